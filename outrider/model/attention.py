"""Attention over paged KV, registered with transformers as an attention implementation.

A step is one flat row of N tokens, `[1, N]`, that belong to several sequences. The model
runs unchanged; in each layer its attention calls `attend`, which finds the step in the
keyword arguments, writes the new keys and values to their pages and lets every sequence
attend to its own pages only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from outrider.errors import UnsupportedModelError
from outrider.model.blocks import BLOCK_TOKENS

NAME = "outrider_paged"
STEP_ARGUMENT = "outrider_step"
# Keyword arguments that models pass along and that do not change what attention computes
# here: positions are in the rotary embedding already, the rest is about caches and outputs.
_HARMLESS = {
    "cache",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "use_cache",
}


class Step(Protocol):
    """What the registered function hands each layer's attention to."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: "How"
    ) -> torch.Tensor:
        """Attention of q [H, N, D] over k, v [Hkv, N, D] and what came before: [N, H, Dv]."""
        ...


@dataclass(frozen=True, slots=True)
class How:
    """The variant of attention that a layer asks for."""

    scaling: float
    window: int | None
    softcap: float | None


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one sequence in a step: rows [begin, end), the first at position `start`."""

    begin: int
    end: int
    start: int
    blocks: Sequence[int]

    @property
    def rows(self) -> int:
        """How many rows."""
        return self.end - self.begin

    @property
    def context(self) -> int:
        """Tokens that the last row sees, itself included."""
        return self.start + self.rows


@dataclass(slots=True)
class KvShapes:
    """A step that only records what each layer's keys and values look like."""

    shapes: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: How
    ) -> torch.Tensor:
        """Record (Hkv, D, Dv) and give zeros of the right shape."""
        self.shapes[layer] = (k.shape[0], k.shape[2], v.shape[2])
        return q.new_zeros(q.shape[1], q.shape[0], v.shape[2])


class PagedStep:
    """One step over pages: keys and values of a layer are [blocks, BLOCK_TOKENS, Hkv, D]."""

    def __init__(self, pages: Sequence[tuple[torch.Tensor, torch.Tensor]], spans: list[Span]):
        self._pages = pages
        self._spans = spans
        device = pages[0][0].device
        slots = [
            span.blocks[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS
            for span in spans
            for position in range(span.start, span.context)
        ]
        self._slots = torch.tensor(slots, device=device)
        self._blocks = [_block_index(span, device) for span in spans]
        self._masks: dict[tuple[int, int | None, int], torch.Tensor | None] = {}

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: How
    ) -> torch.Tensor:
        """Write k and v, then attend sequence by sequence."""
        keys, values = self._pages[layer]
        keys.view(-1, *keys.shape[2:])[self._slots] = k.transpose(0, 1)
        values.view(-1, *values.shape[2:])[self._slots] = v.transpose(0, 1)
        heads, kv_heads = q.shape[0], k.shape[0]
        out = q.new_empty(q.shape[1], heads, v.shape[2])
        for index, span in enumerate(self._spans):
            past_k = self._gather(keys, index, span)
            past_v = self._gather(values, index, span)
            # Query heads that share a KV head are further rows of that head: [Hkv, G * n, D].
            grouped = q[:, span.begin : span.end].reshape(kv_heads, -1, q.shape[2])
            mask = self._mask(index, how.window, heads // kv_heads)
            result = _attention(grouped, past_k, past_v, mask, how)
            result = result.view(heads, span.rows, v.shape[2])
            out[span.begin : span.end] = result.transpose(0, 1)
        return out

    def _gather(self, pages: torch.Tensor, index: int, span: Span) -> torch.Tensor:
        """The first `context` tokens of a sequence: [Hkv, context, D]."""
        where = self._blocks[index]
        chosen = pages[where] if isinstance(where, slice) else pages.index_select(0, where)
        flat = chosen.reshape(-1, *pages.shape[2:])
        return flat[: span.context].transpose(0, 1)

    def _mask(self, index: int, window: int | None, groups: int) -> torch.Tensor | None:
        """What may be seen, as [G * n, context] bool; None when everything may."""
        memo = (index, window, groups)
        if memo not in self._masks:
            self._masks[memo] = _visible(self._spans[index], window, groups, self._slots.device)
        return self._masks[memo]


def _block_index(span: Span, device: torch.device) -> slice | torch.Tensor:
    """The blocks that hold the context; neighbours are a slice, which copies nothing."""
    used = list(span.blocks[: -(-span.context // BLOCK_TOKENS)])
    first = used[0]
    if used == list(range(first, first + len(used))):
        return slice(first, first + len(used))
    return torch.tensor(used, device=device)


def _visible(
    span: Span, window: int | None, groups: int, device: torch.device
) -> torch.Tensor | None:
    """Row i at position p sees the positions up to p, at most `window` of them."""
    if span.rows == 1 and (window is None or span.context <= window):
        return None
    rows = torch.arange(span.start, span.context, device=device)[:, None]
    columns = torch.arange(span.context, device=device)[None, :]
    visible = columns <= rows
    if window is not None:
        visible &= columns > rows - window
    return visible.repeat(groups, 1)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, how: How
) -> torch.Tensor:
    """softmax(q k^T * scaling) v for q [B, R, D] and k, v [B, L, D], with a soft cap if asked."""
    if how.softcap is None:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=how.scaling)
    scores = torch.matmul(q, k.transpose(1, 2)) * how.scaling
    scores = torch.tanh(scores / how.softcap) * how.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.matmul(scores.softmax(-1), v)


def _attention_function(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls: q [1, H, N, D] to ([1, N, H, Dv], None)."""
    step: Step | None = others.pop(STEP_ARGUMENT, None)
    if step is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} does not hand keyword arguments to its attention"
        )
    if attention_mask is not None or dropout:
        raise UnsupportedModelError(f"{type(module).__name__} needs a mask or dropout of its own")
    unknown = {name for name, value in others.items() if value is not None} - _HARMLESS
    if unknown:
        raise UnsupportedModelError(
            f"attention of {type(module).__name__} has a variant that is not supported here: "
            f"{', '.join(sorted(unknown))}"
        )
    how = How(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
    )
    layer: Any = module.layer_idx
    return step.attend(layer, query[0], key[0], value[0], how)[None], None


def _no_mask(*_: Any, **__: Any) -> None:
    """Masks are the step's own business."""


def register() -> None:
    """Make the implementation known to transformers; more than once does no harm."""
    AttentionInterface.register(NAME, _attention_function)
    AttentionMaskInterface.register(NAME, _no_mask)
