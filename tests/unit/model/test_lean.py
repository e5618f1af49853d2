"""The lean forward against the model's own, in every arrangement of a sequence's blocks."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from outrider.model.blocks import BlockTable
from outrider.model.fast import FastNumerics
from outrider.model.lean import LeanDecoder
from outrider.model.linears.install import Packer
from outrider.model.linears.kinds import DENSE, KINDS
from outrider.model.loading import load_model
from outrider.model.numerics import FAST, choose_numerics
from outrider.model.paged import PagedModel, Segment
from tests.support.models import VOCABULARY, save_model, save_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama-tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-scaled-rope": lambda: LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    ),
    "mistral-window": lambda: MistralConfig(**SIZES, sliding_window=24),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen2-window": lambda: Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=24, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=12),
}


def save(where: Path, name: str) -> Path:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(CONFIGS[name]())
    with torch.no_grad():
        for parameter in model.parameters():
            # Norm weights and biases too: ones and zeros would hide that they are left out.
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(where)
    save_tokenizer(where)
    return where


def own_logits(path: Path, tokens: list[int]) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    with torch.inference_mode():
        logits: torch.Tensor = model.eval()(input_ids=torch.tensor([tokens])).logits[0]
    return logits


def paged_logits(model: PagedModel, blocks: list[int], tokens: list[int]) -> torch.Tensor:
    """All rows of a sequence over these blocks: chunks, steps and drafts, beside a neighbour."""
    table, other = BlockTable(blocks), BlockTable([30, 31, 33])
    rows = []
    edges = [0, 7, 23, 24, 48, 53, len(tokens) - 1, len(tokens)]
    for begin, end in pairwise(edges):
        table.kv_len = begin
        model.forward([Segment([1, 2], table, 2)])
        neighbour = Segment([9, 8, 7], other, 2)
        logits = model.forward([neighbour, Segment(tokens[begin:end], table, end - begin)])
        rows.append(logits[2:])
        other.kv_len += 3
    return torch.cat(rows)


ARRANGEMENTS = {
    "neighbours": [4, 5, 6, 7, 8, 9, 10],
    "two runs": [20, 21, 4, 5, 6, 7, 8],
    "three runs": [20, 4, 5, 6, 12, 13, 14],
    "scattered": [20, 3, 11, 5, 1, 9, 16],
}


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_lean_forward_is_the_models_own(name: str, arrangement: str, tmp_path: Path) -> None:
    path = save(tmp_path, name)
    tokens = torch.randint(0, VOCABULARY, (90,), generator=torch.Generator().manual_seed(1))
    loaded = load_model(str(path))
    numerics = choose_numerics(FAST, loaded, linears="dense")
    assert isinstance(numerics, LeanDecoder)
    model = PagedModel(loaded, 40, numerics)
    actual = paged_logits(model, ARRANGEMENTS[arrangement], tokens.tolist())
    torch.testing.assert_close(actual, own_logits(path, tokens.tolist()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_scattered_blocks_do_not_change_other_models(
    family: str, arrangement: str, tmp_path: Path
) -> None:
    path = save_model(tmp_path, family)
    tokens = torch.randint(0, VOCABULARY, (90,), generator=torch.Generator().manual_seed(1))
    loaded = load_model(str(path))
    numerics = choose_numerics(FAST, loaded, linears="dense")
    assert isinstance(numerics, FastNumerics)
    model = PagedModel(loaded, 40, numerics)
    actual = paged_logits(model, ARRANGEMENTS[arrangement], tokens.tolist())
    torch.testing.assert_close(actual, own_logits(path, tokens.tolist()), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", [kind.name for kind in KINDS])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_every_kind_of_linear_gives_the_models_own_logits(
    family: str, kind: str, tmp_path: Path
) -> None:
    path = save_model(tmp_path, family)
    loaded = load_model(str(path))
    model = PagedModel(loaded, 40, choose_numerics(FAST, loaded, linears=kind))
    tokens = list(range(60))
    actual = paged_logits(model, [4, 5, 6, 7], tokens)
    torch.testing.assert_close(actual, own_logits(path, tokens), rtol=1e-3, atol=1e-3)


def test_weights_are_in_memory_once(tmp_path: Path) -> None:
    loaded = load_model(str(save(tmp_path, "llama-tied")))
    module: Any = loaded.module
    choose_numerics(FAST, loaded)
    held = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in module.parameters()
    }
    embedding = module.get_input_embeddings().weight
    assert embedding.untyped_storage().nbytes() == VOCABULARY * 48 * 4
    # What is left are norms, the embedding, and a number for each of the others.
    assert sum(held.values()) < VOCABULARY * 48 * 4 + 40 * 48 * 4


@pytest.mark.parametrize("change", [{"hidden_act": "gelu"}, {"model_type": "other"}])
def test_a_decoder_that_is_built_otherwise_is_left_to_its_own_code(
    change: dict[str, str], tmp_path: Path
) -> None:
    loaded = load_model(str(save(tmp_path, "llama")))
    for name, value in change.items():
        setattr(loaded.module.config, name, value)
    assert LeanDecoder.of(loaded.module, Packer(kinds=[DENSE]).fuse) is None
