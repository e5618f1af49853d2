"""Llama-like models of several families, and a sequence run in every way a step can hold it."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from outrider.model.blocks import BlockTable
from outrider.model.paged import PagedModel, Segment
from tests.support.models import VOCABULARY, save_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
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
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=32),
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
