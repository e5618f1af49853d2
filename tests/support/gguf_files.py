"""Tiny GGUF files, written as llama.cpp writes them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS = 2
CONTEXT = 128
# Layers of transformers and their tensors.
LINEARS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of a Llama."""

    heads: int = 4
    kv_heads: int = 2
    hidden: int = 64
    inner: int = 96
    vocabulary: int = 96


def write_llama(
    path: Path,
    kinds: Mapping[str, str],
    shape: Shape | None = None,
    *,
    scale: float = 3.0,
    architecture: str = "llama",
) -> Path:
    """A random model; `kinds` are the types of its tensors, F32 where none is told.

    Without a kind of "output" the embedding is the head, too.
    """
    shape = shape or Shape()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden,
            intermediate_size=shape.inner,
            num_hidden_layers=LAYERS,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            max_position_embeddings=CONTEXT,
        )
    )
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(shape.hidden // shape.heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["t", "0", *(f"t{i}" for i in range(shape.vocabulary - 2))])
    writer.add_token_merges(["t 0"])
    writer.add_eos_token_id(1)
    pairs = {"attn_q": shape.heads, "attn_k": shape.kv_heads}

    def add(tensor: str, weight: torch.Tensor) -> None:
        name = tensor.rsplit(".", 1)[-1]
        array = (weight.detach() * scale).numpy()
        if name in pairs:
            array = neighbouring_pairs(array, pairs[name])
        kind = gguf.GGMLQuantizationType[kinds.get(name, "F32")]
        data = array if kind.name == "F32" else gguf.quantize(array, kind)
        writer.add_tensor(f"{tensor}.weight", data, raw_dtype=kind)

    add("token_embd", model.model.embed_tokens.weight)
    if "output" in kinds:
        add("output", model.lm_head.weight)
    add("output_norm", model.model.norm.weight)
    for number, layer in enumerate(model.model.layers):
        for own, name in (LINEARS | NORMS).items():
            add(f"blk.{number}.{name}", layer.get_submodule(own).weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def neighbouring_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Queries and keys as llama.cpp orders them: the two that are rotated together adjoin."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)
