"""The forward pass of Llama-like decoders (`outrider.model.parts`) with few, fused operators.

On small models and few rows the framework around a forward costs as much as its arithmetic:
calls of modules, keyword arguments, one operator for every step of a norm. Here the same
weights go through one loop over torch's operators, on any device and in any type.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from outrider.model.attention import How
from outrider.model.flex import AttentionKind
from outrider.model.linears.kinds import Linear
from outrider.model.paged_attention import PagedAttention, StepAttention
from outrider.model.pages import KvPages
from outrider.model.parts import Decoder, Layer, Norm
from outrider.model.rows import StepOutput, StepRows

# Makes the product of several linear layers that read the same rows, results side by side.
Fuse = Callable[[Sequence[torch.nn.Linear]], Linear]


@dataclass(frozen=True, slots=True)
class _Layer:
    """One decoder layer over fused products."""

    attention_norm: Norm
    qkv: Linear
    head_norms: tuple[Norm, Norm] | None
    how: How
    out: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear


class LeanDecoder:
    """A decoder as a list of layers over fused linears; a `Numerics`.

    Shapes: N rows, H query heads, Hkv heads of keys and values, of size D.
    """

    arithmetic: ClassVar[str] = "fast"
    keys_by_block: ClassVar[bool] = False

    def __init__(
        self, parts: Decoder, fuse: Fuse, attention: AttentionKind = PagedAttention
    ) -> None:
        """`fuse` is called once for each product and may take the weights out of the module."""
        self._parts = parts
        self._heads, self._kv_heads = parts.heads, parts.kv_heads
        self._layers = [_layer(layer, fuse) for layer in parts.layers]
        self._head = fuse([parts.head])
        self._attention = attention
        self._total = parts.total or _same

    def run(
        self,
        module: PreTrainedModel,
        pages: KvPages,
        rows: StepRows,
        inputs: torch.Tensor | None = None,
    ) -> StepOutput:
        """Run the step; see `Numerics`."""
        device = pages.device
        x = inputs
        if x is None:
            ids = torch.tensor(rows.token_ids, device=device)
            x = self._parts.embed(ids)
        positions = torch.tensor([rows.positions], device=device)
        cos, sin = (part[0, :, None] for part in self._parts.rotary(x, positions))  # [N, 1, D]
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
                    return StepOutput(x.new_empty(0, self._parts.head.out_features), x[:0])
                if len(wanted) < len(x):
                    x, mixed = x[wanted], mixed[wanted]
            x = self._total(layer.out(mixed)).add_(x)
            gate, up = layer.gate_up(normalised(x, layer.mlp_norm)).chunk(2, -1)
            x = self._total(layer.down(functional.silu(gate).mul_(up))).add_(x)
        hidden = normalised(x, self._parts.norm)
        return StepOutput(self._head(hidden), hidden)

    def _attend(
        self,
        index: int,
        layer: _Layer,
        x: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        attention: StepAttention,
    ) -> torch.Tensor:
        """The rows x [N, hidden] mixed with what came before: [N, H * D]."""
        qkv = layer.qkv(normalised(x, layer.attention_norm))
        rotated = self._heads + self._kv_heads
        heads = qkv.view(len(x), rotated + self._kv_heads, -1)
        turning = heads[:, :rotated]
        if layer.head_norms is not None:
            q_norm, k_norm = layer.head_norms
            turning = torch.cat(
                [
                    normalised(heads[:, : self._heads], q_norm),
                    normalised(heads[:, self._heads : rotated], k_norm),
                ],
                1,
            )
        cos, signed_sin = rotation
        swapped = turning.roll(cos.shape[-1] // 2, -1)
        heads[:, :rotated] = torch.addcmul(turning * cos, swapped, signed_sin)
        attention.keep(index, heads[:, self._heads :].flatten(1))
        return attention.attend(index, heads[:, : self._heads], layer.how).flatten(1)


def _same(x: torch.Tensor) -> torch.Tensor:
    """The sum over one rank."""
    return x


def normalised(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """The norm over the last dimension of x."""
    return functional.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)


def _layer(layer: Layer, fuse: Fuse) -> _Layer:
    return _Layer(
        attention_norm=layer.attention_norm,
        qkv=fuse([layer.q, layer.k, layer.v]),
        head_norms=layer.head_norms,
        how=How(layer.scaling, layer.window, None),
        out=fuse([layer.out]),
        mlp_norm=layer.mlp_norm,
        gate_up=fuse([layer.gate, layer.up]),
        down=fuse([layer.down]),
    )
