"""A GGUF file, written here as llama.cpp writes it: its weights stay packed and stay its own."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.model.blocks import BlockTable
from outrider.model.gguf import GgufWeights
from outrider.model.lean import LeanDecoder
from outrider.model.loading import load_model
from outrider.model.numerics import FAST, choose_numerics
from outrider.model.paged import PagedModel, Segment

HEADS, KV_HEADS, HIDDEN, INNER, VOCABULARY, LAYERS = 4, 2, 64, 96, 96, 2
NAMES = {
    "self_attn.q_proj": ("attn_q", "Q4_1"),
    "self_attn.k_proj": ("attn_k", "Q4_1"),
    "self_attn.v_proj": ("attn_v", "Q4_1"),
    "self_attn.o_proj": ("attn_output", "Q4_0"),
    "mlp.gate_proj": ("ffn_gate", "Q4_1"),
    "mlp.up_proj": ("ffn_up", "Q8_0"),
    "mlp.down_proj": ("ffn_down", "Q8_0"),
    "input_layernorm": ("attn_norm", "F32"),
    "post_attention_layernorm": ("ffn_norm", "F32"),
}


def neighbouring_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Queries and keys as llama.cpp orders them: the two that are rotated together adjoin."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            max_position_embeddings=128,
        )
    )
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(VOCABULARY)])
    writer.add_token_merges(["t 0"])
    writer.add_eos_token_id(1)

    def add(name: str, weight: torch.Tensor, kind: str) -> None:
        array = (weight.detach() * 3).numpy()
        if name.endswith("attn_q.weight"):
            array = neighbouring_pairs(array, HEADS)
        if name.endswith("attn_k.weight"):
            array = neighbouring_pairs(array, KV_HEADS)
        kind_ = gguf.GGMLQuantizationType[kind]
        data = array if kind == "F32" else gguf.quantize(array, kind_)
        writer.add_tensor(name, data, raw_dtype=kind_)

    add("token_embd.weight", model.model.embed_tokens.weight, "Q8_0")
    add("output.weight", model.lm_head.weight, "F32")
    add("output_norm.weight", model.model.norm.weight, "F32")
    for number, layer in enumerate(model.model.layers):
        for own, (name, kind) in NAMES.items():
            add(f"blk.{number}.{name}.weight", layer.get_submodule(own).weight, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "tiny.gguf"


def test_each_layer_finds_the_integers_that_it_came_from(path: Path) -> None:
    loaded = load_model(str(path))
    module: Any = loaded.module
    weights = GgufWeights(path, module)
    for layer in module.model.layers:
        for own, (_, kind) in NAMES.items():
            if kind != "F32":
                linear = layer.get_submodule(own)
                found = weights.find(linear)
                assert found is not None, own
                assert torch.equal(found.dense(), linear.weight)
                assert found.bits == (8 if kind == "Q8_0" else 4)
    # Not quantised in the file, so not here.
    assert weights.find(module.lm_head) is None


def test_a_layer_whose_weight_was_changed_stays_unpacked(path: Path) -> None:
    loaded = load_model(str(path))
    module: Any = loaded.module
    linear = module.model.layers[0].mlp.down_proj
    with torch.no_grad():
        linear.weight[3, 5] += 1e-3
    assert GgufWeights(path, module).find(linear) is None


@pytest.mark.parametrize("forward", ["lean", "module"])
def test_packed_model_agrees_with_the_unpacked_one(path: Path, forward: str) -> None:
    loaded = load_model(str(path))
    tokens = list(range(40))
    with torch.inference_mode():
        exact = PagedModel(loaded, 8).forward([Segment(tokens, BlockTable([1, 2, 3]), 40)])
    numerics = choose_numerics(FAST, loaded, forward=forward)
    assert isinstance(numerics, LeanDecoder) is (forward == "lean")
    packed = PagedModel(loaded, 8, numerics).forward([Segment(tokens, BlockTable([1, 2, 3]), 40)])
    error = (packed - exact).norm() / exact.norm()
    # Rounding to bfloat16 in each product; anything that is left out makes it far larger.
    assert error < 0.03


def test_unpacked_on_request(path: Path) -> None:
    loaded = load_model(str(path))
    tokens = list(range(40))
    exact = PagedModel(loaded, 8).forward([Segment(tokens, BlockTable([1, 2, 3]), 40)])
    numerics = choose_numerics(FAST, loaded, linears="dense")
    dense = PagedModel(loaded, 8, numerics).forward([Segment(tokens, BlockTable([1, 2, 3]), 40)])
    torch.testing.assert_close(dense, exact, rtol=1e-4, atol=1e-4)
