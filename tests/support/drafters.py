"""Draft models for tests: copies of a target that differ from it in one respect."""

import json
import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tests.support.models import TOKENS, perturbed


def with_context(source: Path, where: Path, tokens: int) -> Path:
    """A copy whose context is shorter."""
    shutil.copytree(source, where, dirs_exist_ok=True)
    config = json.loads((where / "config.json").read_text())
    config["max_position_embeddings"] = tokens
    (where / "config.json").write_text(json.dumps(config))
    return where


def with_loud_padding(path: Path) -> Path:
    """Makes the padding ids of a model the likeliest by far, in place."""
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        padding = model.lm_head.weight[TOKENS:]
        padding.copy_(3 * model.lm_head.weight[: len(padding)])
    model.save_pretrained(path)
    return path


def with_other_padding(source: Path, where: Path, *, rows: int, noise: float) -> Path:
    """A noisy copy with `rows` embedding rows, and a token that the source's model lacks."""
    perturbed(source, where, noise=noise)
    model = AutoModelForCausalLM.from_pretrained(where)
    model.resize_token_embeddings(rows, mean_resizing=False)
    model.save_pretrained(where)
    backend = Tokenizer.from_file(str(where / "tokenizer.json"))
    backend.add_special_tokens(["<extra>"])
    assert backend.token_to_id("<extra>") == TOKENS
    backend.save(str(where / "tokenizer.json"))
    return with_loud_padding(where)
