"""`numerics = fast`: every row of a step at once, each sequence's rows attending together.

Sums in floating point depend on the shape of the batch, so a row's logits may differ in the
last bits with what shares its step.
"""

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from outrider.model.attention import STEP_ARGUMENT, How
from outrider.model.pages import KvPages
from outrider.model.rows import Span, StepRows


class FastNumerics:
    """One forward of the model over all rows."""

    def logits(self, module: PreTrainedModel, pages: KvPages, rows: StepRows) -> torch.Tensor:
        """Run the step: logits [len(rows.wanted), V] in the model's own type."""
        # At least one row goes through the head: models take a slice of none for all.
        wanted = torch.tensor(rows.wanted or [0], device=pages.device)
        output = module(
            input_ids=torch.tensor([rows.token_ids], device=pages.device),
            position_ids=torch.tensor([rows.positions], device=pages.device),
            use_cache=False,
            logits_to_keep=wanted,
            **{STEP_ARGUMENT: FastStep(pages, rows.spans)},
        )
        logits: torch.Tensor = output.logits[0, : len(rows.wanted)]
        return logits


class FastStep:
    """Attention of one step, sequence by sequence."""

    def __init__(self, pages: KvPages, spans: list[Span]) -> None:
        self._pages = pages
        self._spans = spans
        slots = [span.slot(i) for span in spans for i in range(span.start, span.context)]
        self._slots = torch.tensor(slots, device=pages.device)
        self._blocks = [pages.block_index(span) for span in spans]
        self._masks: dict[tuple[int, int | None, int], torch.Tensor | None] = {}

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: How
    ) -> torch.Tensor:
        """Write k and v, then attend: q [H, N, D] to [N, H, Dv]."""
        self._pages.write(layer, self._slots, k, v)
        heads, kv_heads = q.shape[0], k.shape[0]
        out = q.new_empty(q.shape[1], heads, v.shape[2])
        for index, span in enumerate(self._spans):
            keys, values = (
                kept[: span.context].transpose(0, 1)
                for kept in self._pages.read(layer, self._blocks[index])
            )
            # Query heads that share a KV head are further rows of that head: [Hkv, G * n, D].
            grouped = q[:, span.begin : span.end].reshape(kv_heads, -1, q.shape[2])
            mask = self._mask(index, how.window, heads // kv_heads)
            result = attention(grouped, keys, values, mask, how).view(heads, span.rows, -1)
            out[span.begin : span.end] = result.transpose(0, 1)
        return out

    def _mask(self, index: int, window: int | None, groups: int) -> torch.Tensor | None:
        """What may be seen, as [G * n, context] bool; None when everything may."""
        memo = (index, window, groups)
        if memo not in self._masks:
            mask = visible(self._spans[index], window, self._pages.device)
            self._masks[memo] = None if mask is None else mask.repeat(groups, 1)
        return self._masks[memo]


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
    """softmax(q k^T * scaling) v for q [B, R, D] and k, v [B, L, D], with a soft cap if asked."""
    if how.softcap is None:
        # Four dimensions, because only then the fused kernel is used.
        return functional.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask, scale=how.scaling
        )[0]
    scores = torch.matmul(q, k.transpose(1, 2)) * how.scaling
    scores = torch.tanh(scores / how.softcap) * how.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.matmul(scores.softmax(-1), v)
