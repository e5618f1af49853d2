"""The parts of Llama-like decoders: what a forward of our own is built from.

    x = embed(tokens)
    for each layer:
        q, k, v = qkv(norm(x)); rotate q, k; write k, v; x += out(attention(q))
        x += down(silu(gate) * up), gate and up from one product
    logits = head(norm(x[wanted]))

Where a model is split over ranks, its parts are one rank's, and what `out` and `down` give is
summed over the ranks before it is added.

What a model computes stays its own affair: `parts_of` takes only decoders that are known to be
built this way, and a verify worker compares the two at start (`outrider.model.selfcheck`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from outrider.model.linears.packed import QuantisedLinear
from outrider.model.parallel.linears import RowLinear

_MODEL_TYPES = {"llama", "mistral", "qwen2", "qwen3"}
_LINEAR_TYPES = {torch.nn.Linear, QuantisedLinear}


@dataclass(frozen=True, slots=True)
class Norm:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

    weight: torch.Tensor
    eps: float

    @classmethod
    def of(cls, module: Any) -> Self:
        """The norm that a module of transformers computes."""
        return cls(module.weight, module.variance_epsilon)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer; `head_norms` are those of queries and keys where a model has them.

    `window`: the positions that a row sees, its own included; None: all.
    """

    attention_norm: Norm
    q: torch.nn.Linear
    k: torch.nn.Linear
    v: torch.nn.Linear
    head_norms: tuple[Norm, Norm] | None
    scaling: float
    window: int | None
    out: torch.nn.Linear
    mlp_norm: Norm
    gate: torch.nn.Linear
    up: torch.nn.Linear
    down: torch.nn.Linear


@dataclass(frozen=True, slots=True)
class Decoder:
    """A whole decoder, or one rank's part of it.

    `embed` gives the rows [N, hidden] of N tokens, `rotary` cos and sin [1, N, D] of positions.
    `total` sums rows over the ranks, in place; None: there is one rank.
    """

    embed: Any
    rotary: Any
    layers: list[Layer]
    norm: Norm
    head: torch.nn.Linear
    heads: int
    kv_heads: int
    total: Callable[[torch.Tensor], torch.Tensor] | None = None


def parts_of(module: PreTrainedModel) -> Decoder | None:
    """The parts of a model, or None when it is not built like the ones known here."""
    untyped: Any = module
    config = untyped.config
    if config.model_type not in _MODEL_TYPES or config.hidden_act != "silu":
        return None
    if any(type(linear) not in _LINEAR_TYPES for linear in _linears(untyped)):
        return None
    # Norms of every family have a class of their own, by one name.
    if not all(type(norm).__name__.endswith("RMSNorm") for norm in _norms(untyped)):
        return None
    layers = [_layer(layer) for layer in untyped.model.layers]
    first = untyped.model.layers[0]
    return Decoder(
        untyped.model.embed_tokens,
        untyped.model.rotary_emb,
        layers,
        Norm.of(untyped.model.norm),
        untyped.lm_head,
        layers[0].q.out_features // first.self_attn.head_dim,
        layers[0].k.out_features // first.self_attn.head_dim,
        _total(first.mlp.down_proj),
    )


def _total(linear: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    return linear.group.total if isinstance(linear, RowLinear) else None


def _layer(layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return Layer(
        attention_norm=Norm.of(layer.input_layernorm),
        q=attention.q_proj,
        k=attention.k_proj,
        v=attention.v_proj,
        head_norms=None if q_norm is None else (Norm.of(q_norm), Norm.of(k_norm)),
        scaling=attention.scaling,
        window=_window(attention),
        out=_own(attention.o_proj),
        mlp_norm=Norm.of(layer.post_attention_layernorm),
        gate=mlp.gate_proj,
        up=mlp.up_proj,
        down=_own(mlp.down_proj),
    )


def _own(linear: Any) -> torch.nn.Linear:
    """This rank's product of a layer that may be split by its inputs."""
    own: torch.nn.Linear = linear.inner if isinstance(linear, RowLinear) else linear
    return own


def _window(attention: Any) -> int | None:
    """The sliding window of a layer: some families keep it in the layer, Mistral in its config."""
    if hasattr(attention, "sliding_window"):
        window: int | None = attention.sliding_window
        return window
    if attention.config.model_type == "mistral":
        return getattr(attention.config, "sliding_window", None)
    return None


def _norms(module: Any) -> Iterator[torch.nn.Module]:
    for layer in module.model.layers:
        yield from (layer.input_layernorm, layer.post_attention_layernorm)
        for name in ("q_norm", "k_norm"):
            if hasattr(layer.self_attn, name):
                yield getattr(layer.self_attn, name)
    yield module.model.norm


def _linears(module: Any) -> Iterator[torch.nn.Module]:
    for layer in module.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        yield from (attention.q_proj, attention.k_proj, attention.v_proj)
        yield from (_own(attention.o_proj), mlp.gate_proj, mlp.up_proj, _own(mlp.down_proj))
    yield module.lm_head
