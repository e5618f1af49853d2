"""The forward pass of Llama-like decoders with few, fused operators.

On small models and few rows the framework around a forward costs as much as its arithmetic:
calls of modules, keyword arguments, one operator for every step of a norm. Here the same
weights go through one loop:

    x = embed(tokens)
    for each layer:
        q, k, v = qkv(norm(x)); rotate q, k; write k, v; x += out(attention(q))
        x += down(silu(gate) * up), gate and up from one product
    logits = head(norm(x[wanted]))

What a model computes stays its own affair: `LeanDecoder.of` takes only decoders that are known
to be built this way, and a verify worker compares the two at start (`outrider.model.selfcheck`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from outrider.model.attention import How
from outrider.model.flex import AttentionKind
from outrider.model.linears.kinds import Linear
from outrider.model.paged_attention import PagedAttention, StepAttention
from outrider.model.pages import KvPages
from outrider.model.rows import StepRows

# Decoders whose forward is the one above, apart from what `_layer` reads off the modules.
_MODEL_TYPES = {"llama", "mistral", "qwen2", "qwen3"}

# Makes the product of several linear layers that read the same rows, results side by side.
Fuse = Callable[[Sequence[torch.nn.Linear]], Linear]


@dataclass(frozen=True, slots=True)
class _Norm:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

    weight: torch.Tensor
    eps: float

    @classmethod
    def of(cls, module: Any) -> Self:
        return cls(module.weight, module.variance_epsilon)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One decoder layer; `head_norms` are those of queries and keys where a model has them."""

    attention_norm: _Norm
    qkv: Linear
    head_norms: tuple[_Norm, _Norm] | None
    how: How
    out: Linear
    mlp_norm: _Norm
    gate_up: Linear
    down: Linear


class LeanDecoder:
    """A decoder as a list of layers over fused linears; a `Numerics`.

    Shapes: N rows, H query heads, Hkv heads of keys and values, of size D.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        layers: Sequence[_Layer],
        heads: tuple[int, int],
        head: Linear,
        attention: AttentionKind,
    ) -> None:
        untyped: Any = module
        self._embed: torch.Tensor = untyped.model.embed_tokens.weight
        self._rotary: Any = untyped.model.rotary_emb
        self._norm = _Norm.of(untyped.model.norm)
        self._layers = layers
        self._heads, self._kv_heads = heads
        self._head = head
        self._attention = attention

    @classmethod
    def of(
        cls, module: PreTrainedModel, fuse: Fuse, attention: AttentionKind = PagedAttention
    ) -> Self | None:
        """The decoder of a module, or None when it is not built like the ones known here.

        `fuse` is called once for each product and may take the weights out of the module.
        """
        untyped: Any = module
        config = untyped.config
        if config.model_type not in _MODEL_TYPES or config.hidden_act != "silu":
            return None
        if any(type(linear) is not torch.nn.Linear for linear in _linears(untyped)):
            return None
        layers = [_layer(layer, fuse) for layer in untyped.model.layers]
        heads = (config.num_attention_heads, config.num_key_value_heads)
        return cls(module, layers, heads, fuse([untyped.lm_head]), attention)

    def logits(self, module: PreTrainedModel, pages: KvPages, rows: StepRows) -> torch.Tensor:
        """Run the step: logits [len(rows.wanted), V] in the model's own type."""
        device = pages.device
        x = functional.embedding(torch.tensor(rows.token_ids, device=device), self._embed)
        positions = torch.tensor([rows.positions], device=device)
        cos, sin = (part[0, :, None] for part in self._rotary(x, positions))  # [N, 1, D]
        # The halves of a head swap places, and the first comes back negative.
        half = sin.shape[-1] // 2
        signed_sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        attention = self._attention(pages, rows.spans)
        last = len(self._layers) - 1
        wanted = torch.tensor(rows.wanted, device=device) if rows.wanted else None
        for index, layer in enumerate(self._layers):
            mixed = self._attend(index, layer, x, (cos, signed_sin), attention)
            if index == last:
                # Only the rows whose logits are wanted go on from the last attention.
                if wanted is None:
                    return x.new_empty(0, len(self._embed))
                if len(wanted) < len(x):
                    x, mixed = x[wanted], mixed[wanted]
            x = layer.out(mixed).add_(x)
            gate, up = layer.gate_up(layer.mlp_norm(x)).chunk(2, -1)
            x = layer.down(functional.silu(gate).mul_(up)).add_(x)
        return self._head(self._norm(x))

    def _attend(
        self,
        index: int,
        layer: _Layer,
        x: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        attention: StepAttention,
    ) -> torch.Tensor:
        """The rows x [N, hidden] mixed with what came before: [N, H * D]."""
        qkv = layer.qkv(layer.attention_norm(x))
        rotated = self._heads + self._kv_heads
        heads = qkv.view(len(x), rotated + self._kv_heads, -1)
        turning = heads[:, :rotated]
        if layer.head_norms is not None:
            q_norm, k_norm = layer.head_norms
            turning = torch.cat(
                [q_norm(heads[:, : self._heads]), k_norm(heads[:, self._heads : rotated])], 1
            )
        cos, signed_sin = rotation
        swapped = turning.roll(cos.shape[-1] // 2, -1)
        heads[:, :rotated] = torch.addcmul(turning * cos, swapped, signed_sin)
        attention.keep(index, heads[:, self._heads :].flatten(1))
        return attention.attend(index, heads[:, : self._heads], layer.how).flatten(1)


def _layer(layer: Any, fuse: Fuse) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return _Layer(
        attention_norm=_Norm.of(layer.input_layernorm),
        qkv=fuse([attention.q_proj, attention.k_proj, attention.v_proj]),
        head_norms=None if q_norm is None else (_Norm.of(q_norm), _Norm.of(k_norm)),
        how=How(attention.scaling, _window(attention), None),
        out=fuse([attention.o_proj]),
        mlp_norm=_Norm.of(layer.post_attention_layernorm),
        gate_up=fuse([mlp.gate_proj, mlp.up_proj]),
        down=fuse([mlp.down_proj]),
    )


def _window(attention: Any) -> int | None:
    """The sliding window of a layer: some families keep it in the layer, Mistral in its config."""
    if hasattr(attention, "sliding_window"):
        window: int | None = attention.sliding_window
        return window
    if attention.config.model_type == "mistral":
        return getattr(attention.config, "sliding_window", None)
    return None


def _linears(module: Any) -> Iterator[torch.nn.Module]:
    for layer in module.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        yield from (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        yield from (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    yield module.lm_head
