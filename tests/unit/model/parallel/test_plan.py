"""Which slice a rank has, and which layouts are refused."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, CodeGenConfig, Phi3Config, Qwen3MoeConfig

from outrider.errors import UnsupportedModelError
from outrider.model.parallel.plan import Kind, Split, split_plan, vocabulary_range
from tests.support.models import FAMILIES


def empty(config: Any) -> Any:
    untyped: Any = AutoModelForCausalLM
    with torch.device("meta"):
        return untyped.from_config(config)


def resized(family: str, **sizes: int) -> Any:
    config = FAMILIES[family]()
    for name, value in sizes.items():
        setattr(config, name, value)
    return empty(config)


def test_the_plan_of_a_llama() -> None:
    plan = split_plan(empty(FAMILIES["llama"]()), 2)
    layer = "model.layers.1"
    assert plan[f"{layer}.self_attn.q_proj"] == Split(Kind.COLUMN, 4)
    assert plan[f"{layer}.self_attn.k_proj"] == Split(Kind.COLUMN, 2)
    assert plan[f"{layer}.self_attn.o_proj"] == Split(Kind.ROW, 4)
    assert plan[f"{layer}.mlp.down_proj"] == Split(Kind.ROW, 64)
    assert plan["model.embed_tokens"] == plan["lm_head"] == Split(Kind.VOCABULARY, 272)
    assert f"{layer}.input_layernorm" not in plan


def test_norms_of_heads_stay_whole() -> None:
    assert not [name for name in split_plan(empty(FAMILIES["qwen3"]()), 4) if "norm" in name]


def test_slices_of_three_ranks_of_nine_heads_and_three_kv_heads() -> None:
    queries, keys = Split(Kind.COLUMN, 9), Split(Kind.COLUMN, 3)
    assert [queries.range(rank, 3, 576) for rank in range(3)] == [(0, 192), (192, 384), (384, 576)]
    assert [keys.range(rank, 3, 192) for rank in range(3)] == [(0, 64), (64, 128), (128, 192)]


def test_ranks_share_the_kv_heads_that_are_fewer() -> None:
    keys = Split(Kind.COLUMN, 2)
    assert [keys.range(rank, 4, 16) for rank in range(4)] == [(0, 8), (0, 8), (8, 16), (8, 16)]


@pytest.mark.parametrize("vocabulary", [272, 257, 49152])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_slices_of_the_vocabulary_cover_it(vocabulary: int, size: int) -> None:
    ranges = [vocabulary_range(rank, size, vocabulary) for rank in range(size)]
    assert [token for begin, end in ranges for token in range(begin, end)] == [*range(vocabulary)]


@pytest.mark.parametrize(
    ("sizes", "ranks", "words"),
    [
        ({}, 3, "4 heads, 2 KV heads, inner size 64, vocabulary 272, 3 ranks"),
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, 4, "12 heads, 6 KV heads"),
        ({"intermediate_size": 63}, 2, "inner size 63"),
        ({"vocab_size": 5, "pad_token_id": 0}, 4, "no part of the vocabulary"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(
    sizes: dict[str, int], ranks: int, words: str
) -> None:
    model = resized("llama", **sizes)
    with pytest.raises(UnsupportedModelError, match=words):
        split_plan(model, ranks)


def test_a_family_without_a_plan_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="gpt2 has no tensor-parallel plan"):
        split_plan(empty(FAMILIES["gpt2"]()), 2)


def test_a_family_without_an_inner_size_is_refused() -> None:
    config = CodeGenConfig(vocab_size=272, n_embd=32, n_layer=1, n_head=4, rotary_dim=4)
    with pytest.raises(UnsupportedModelError, match=r"codegen can't be split .*intermediate_size"):
        split_plan(empty(config), 2)


_SMALL = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    ("config", "layer"),
    [
        (Phi3Config(**_SMALL), "o_proj"),
        (Qwen3MoeConfig(**_SMALL, num_experts=4, moe_intermediate_size=32), "experts"),
    ],
)
def test_fused_products_and_experts_are_refused_by_name(config: Any, layer: str) -> None:
    with pytest.raises(UnsupportedModelError, match=layer):
        split_plan(empty(config), 2)
