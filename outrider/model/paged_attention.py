"""Attention of the rows of a step over their pages, sequence by sequence, without copying them.

Where a sequence's blocks are neighbours, as the pool tries to have it, its KV is a slice. A
sequence in a few runs attends to each and the results are joined by their sums of exponentials
(Dao et al., FlashAttention, arXiv 2205.14135, section 3.1); only one that is scattered more is
gathered first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.nn import functional

from outrider.model.attention import How
from outrider.model.pages import KvPages, Where, runs
from outrider.model.rows import Span

# Runs up to which joining is cheaper than gathering.
_MOST_RUNS = 4


class StepAttention(Protocol):
    """The attention of one step: built once, called by every layer."""

    slots: torch.Tensor

    def keep(self, layer: int, kv: torch.Tensor) -> None:
        """Write the keys and values of the step's rows, side by side: [N, Hkv * D + Hkv * Dv]."""
        ...

    def attend(self, layer: int, q: torch.Tensor, how: How) -> torch.Tensor:
        """q [N, H, D] over the pages, which hold the KV of its rows already: [N, H, Dv]."""
        ...


@dataclass(slots=True)
class _Sequence:
    """The rows of one sequence and where its KV is.

    `before` are runs that every row sees in full; `rest`, from token `rest_begin` on, needs a
    mask when there is more than one row.
    """

    span: Span
    before: list[Where]
    rest: Where
    rest_begin: int
    whole: Where | None = None
    masks: dict[tuple[int, int | None], torch.Tensor | None] = field(default_factory=dict)


class PagedAttention:
    """A `StepAttention` that goes through the sequences one by one."""

    def __init__(self, pages: KvPages, spans: Sequence[Span]) -> None:
        self._pages = pages
        self._sequences = [_located(pages, span) for span in spans]
        slots = [span.slot(i) for span in spans for i in range(span.start, span.context)]
        self.slots = torch.tensor(slots, device=pages.device)

    def keep(self, layer: int, kv: torch.Tensor) -> None:
        """Write the keys and values of the step's rows, side by side: [N, Hkv * D + Hkv * Dv]."""
        self._pages.rows[layer].index_copy_(0, self.slots, kv)

    def attend(self, layer: int, q: torch.Tensor, how: How) -> torch.Tensor:
        """q [N, H, D] over the pages, which hold the KV of its rows already: [N, H, Dv]."""
        if len(self._sequences) == 1:
            return self._sequence(layer, self._sequences[0], q, how)
        out = q.new_empty(*q.shape[:2], self._pages.values[layer].shape[2])
        for one in self._sequences:
            begin, end = one.span.begin, one.span.end
            out[begin:end] = self._sequence(layer, one, q[begin:end], how)
        return out

    def _sequence(self, layer: int, one: _Sequence, q: torch.Tensor, how: How) -> torch.Tensor:
        if one.before and how.window is None and how.softcap is None:
            return self._joined(layer, one, q, how)
        if one.before and one.whole is None:
            one.whole = self._pages.where(one.span, 0, one.span.context)
        k, v = self._pages.read(layer, one.rest if one.whole is None else one.whole)
        return attention(q, k, v, self._mask(one, 0, how.window), how)

    def _joined(self, layer: int, one: _Sequence, q: torch.Tensor, how: How) -> torch.Tensor:
        """Each run by itself, then their mean, weighted by their shares of the softmax."""
        parts = []
        for where in (*one.before, one.rest):
            k, v = self._pages.read(layer, where)
            mask = self._mask(one, one.rest_begin, None) if where is one.rest else None
            parts.append(_with_log_sum(q, k, v, mask, how.scaling))
        log_sums = torch.stack([log_sum for _, log_sum in parts])
        shares = log_sums.softmax(0)[..., None].to(q.dtype)
        results = torch.stack([result for result, _ in parts])
        return (results * shares).sum(0)

    def _mask(self, one: _Sequence, begin: int, window: int | None) -> torch.Tensor | None:
        """0 where the rows may look and -inf elsewhere, [n, tokens from `begin` on]; None: all."""
        memo = (begin, window)
        if memo not in one.masks:
            mask = visible(one.span, window, self._pages.device)
            if mask is not None:
                zeros = torch.zeros(mask.shape, dtype=self._pages.dtype, device=mask.device)
                mask = zeros.masked_fill_(~mask, -torch.inf)[:, begin:]
            one.masks[memo] = mask
        return one.masks[memo]


def _located(pages: KvPages, span: Span) -> _Sequence:
    ranges = runs(span)
    # The rows themselves begin in the first run that is not wholly before them.
    before = [(begin, end) for begin, end in ranges if end <= span.start]
    before = before if len(before) < _MOST_RUNS else []
    rest_begin = before[-1][1] if before else 0
    return _Sequence(
        span,
        [pages.where(span, begin, end) for begin, end in before],
        pages.where(span, rest_begin, span.context),
        rest_begin,
    )


def visible(span: Span, window: int | None, device: torch.device) -> torch.Tensor | None:
    """What the rows of a span see, as [n, context] bool; None when a single row sees all.

    A row at position p sees the chain up to p, or its own path in the tree, and of that the
    last `window` positions.
    """
    if span.rows == 1 and (window is None or span.context <= window):
        return None
    indices = torch.arange(span.context, device=device)
    seen = indices[None, :] <= indices[span.start :, None]
    column_positions = indices
    if span.parents:
        column_positions = torch.tensor(
            [*range(span.start), *span.positions], dtype=indices.dtype, device=device
        )
        for row, path in enumerate(span.paths, span.trunk - span.start):
            seen[row, span.trunk :] = False
            seen[row, path] = True
    if window is not None:
        seen &= column_positions[None, :] > column_positions[span.start :, None] - window
    return seen


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, how: How
) -> torch.Tensor:
    """softmax(q k^T * scaling) v of q [n, H, D] over k [L, Hkv, D] and v [L, Hkv, Dv]: [n, H, Dv].

    `mask` [n, L] is added to the scores. With a soft cap c a score s is c tanh(s / c) first.
    """
    if how.softcap is None:
        keys, values = _heads_first(k), _heads_first(v)
        if len(q) == 1:
            # Query heads that share a KV head are further rows of that head.
            grouped = q.view(1, k.shape[1], -1, q.shape[2])
            result = functional.scaled_dot_product_attention(
                grouped, keys, values, attn_mask=mask, scale=how.scaling
            )
            return result.reshape(1, q.shape[1], -1)
        return functional.scaled_dot_product_attention(
            _heads_first(q),
            keys,
            values,
            attn_mask=mask,
            scale=how.scaling,
            enable_gqa=k.shape[1] != q.shape[1],
        )[0].transpose(0, 1)
    grouped = q.view(len(q), k.shape[1], -1, q.shape[2]).permute(1, 2, 0, 3)
    scores = torch.matmul(grouped, k.permute(1, 2, 0)[:, None]) * how.scaling
    scores = torch.tanh(scores / how.softcap) * how.softcap
    if mask is not None:
        scores = scores + mask
    result = torch.matmul(scores.softmax(-1), v.transpose(0, 1)[:, None])
    return result.permute(2, 0, 1, 3).reshape(len(q), q.shape[1], -1)


def _heads_first(rows: torch.Tensor) -> torch.Tensor:
    """[L, H, D] as [1, H, L, D]: four dimensions, as the fused kernels want them."""
    return rows.transpose(0, 1)[None]


def _with_log_sum(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention [n, H, Dv] and the logarithm of its sum of exponentials [n, H] (float32)."""
    heads, keys, values = _heads_first(q), _heads_first(k), _heads_first(v)
    if q.device.type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        result, log_sum = flash(heads, keys, values, attn_mask=mask, scale=scaling)
        return result[0].transpose(0, 1), log_sum[0].transpose(0, 1)
    groups = q.shape[1] // k.shape[1]
    keys, values = (t.repeat_interleave(groups, 1) for t in (keys, values))
    scores = torch.matmul(heads, keys.transpose(2, 3)).float() * scaling
    if mask is not None:
        scores = scores + mask
    log_sum = scores.logsumexp(-1)
    result = torch.matmul((scores - log_sum[..., None]).exp().to(v.dtype), values)
    return result[0].transpose(0, 1), log_sum[0].transpose(0, 1)
