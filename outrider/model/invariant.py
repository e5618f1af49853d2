"""`numerics = invariant`: a row's logits depend, bit for bit, on its own tokens alone.

Three things make it so:

- The step goes through the model in passes of `pass_rows` rows, the last one padded, so that
  whatever the model computes between its linears has one shape. At a multiple of 32 rows no
  vectorised loop has a remainder; remainders are computed by other instructions.
- Linears run in tiles of fixed heights (`outrider.model.linears`) and skip the padding.
- Every row attends alone, over keys in the order of positions, so that shapes and sums
  depend on its position only: not on the chunk, chain or tree that it came in.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from outrider.model.attention import STEP_ARGUMENT, How
from outrider.model.head import HeadInput, input_arguments
from outrider.model.linears.tiled import LiveRows, tile_linears
from outrider.model.pages import KvPages, Where
from outrider.model.rows import Span, StepOutput, StepRows


@dataclass(slots=True)
class InvariantNumerics:
    """Passes of `pass_rows` rows; `body` and `head` tell the model's linears what is padding."""

    arithmetic: ClassVar[str] = "invariant"
    keys_by_block: ClassVar[bool] = False

    pass_rows: int
    body: LiveRows = field(default_factory=LiveRows)
    head: LiveRows = field(default_factory=LiveRows)

    def prepare(self, module: PreTrainedModel) -> None:
        """Replace the linears of the model; once."""
        untyped: Any = module
        head = untyped.get_output_embeddings()
        tile_linears(module, lambda linear: self.head if linear is head else self.body)

    def run(
        self,
        module: PreTrainedModel,
        pages: KvPages,
        rows: StepRows,
        inputs: torch.Tensor | None = None,
    ) -> StepOutput:
        """Run the step; see `Numerics`."""
        results = [
            self._run(module, pages, rows, begin, inputs)
            for begin in range(0, len(rows.token_ids), self.pass_rows)
        ]
        logits, hidden = zip(*results, strict=True)
        return StepOutput(torch.cat(logits), torch.cat(hidden))

    def _run(
        self,
        module: PreTrainedModel,
        pages: KvPages,
        rows: StepRows,
        begin: int,
        inputs: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass: logits and hidden states wanted of the rows from `begin` on."""
        end = min(begin + self.pass_rows, len(rows.token_ids))
        wanted = [row - begin for row in rows.wanted if begin <= row < end]
        padding = [0] * (self.pass_rows - (end - begin))
        # Without any wanted one row goes through the head all the same, and is dropped.
        head_rows = wanted + [0] * (self.pass_rows - len(wanted)) if wanted else [0]
        self.body.padded, self.body.live = self.pass_rows, end - begin
        self.head.padded, self.head.live = len(head_rows), max(len(wanted), 1)
        try:
            if inputs is not None:
                inputs = functional.pad(inputs[begin:end], (0, 0, 0, len(padding)))
            with HeadInput(module) as head:
                output = module(
                    **input_arguments(rows.token_ids[begin:end] + padding, inputs, pages.device),
                    position_ids=torch.tensor(
                        [rows.positions[begin:end] + padding], device=pages.device
                    ),
                    use_cache=False,
                    logits_to_keep=torch.tensor(head_rows, device=pages.device),
                    **{STEP_ARGUMENT: InvariantStep(pages, rows.spans, begin, end)},
                )
        finally:
            self.body.padded = self.head.padded = 0
        return output.logits[0, : len(wanted)], head.rows[: len(wanted)]


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows of one sequence in a pass."""

    where: Where
    rows: list["_Row"]


@dataclass(frozen=True, slots=True)
class _Row:
    """Row `at` of the pass sees the first `trunk` tokens, then those of its path in a tree."""

    at: int
    trunk: int
    path: torch.Tensor | None


class InvariantStep:
    """Attention of rows [begin, end) of a step, row by row; rows after them are padding."""

    def __init__(self, pages: KvPages, spans: Sequence[Span], begin: int, end: int) -> None:
        self._pages = pages
        slots: list[int] = []
        self._parts: list[_Part] = []
        for span in spans:
            rows = range(max(span.begin, begin), min(span.end, end))
            if rows:
                seen = list(_rows(span, rows, begin, pages.device))
                self._parts.append(_Part(pages.where(span, 0, span.context), seen))
                slots += [span.slot(span.start + row - span.begin) for row in rows]
        self._slots = torch.tensor(slots, device=pages.device)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: How
    ) -> torch.Tensor:
        """Write k and v, then attend: q [H, N, D] to [N, H, Dv]; padding gives zeros."""
        live = len(self._slots)
        self._pages.write(layer, self._slots, k[:, :live], v[:, :live])
        heads, kv_heads = q.shape[0], k.shape[0]
        out = q.new_zeros(q.shape[1], heads, v.shape[2])
        # Query heads that share a KV head are rows of that head: [N, Hkv, G, D].
        queries = q.transpose(0, 1).reshape(q.shape[1], kv_heads, heads // kv_heads, -1)
        for part in self._parts:
            keys, values = self._pages.read(layer, part.where)
            for row in part.rows:
                seen_k, seen_v = _seen(keys, row, how.window), _seen(values, row, how.window)
                result = _row_attention(queries[row.at], seen_k, seen_v, how)
                out[row.at] = result.reshape(heads, -1)
        return out


def _rows(span: Span, rows: range, begin: int, device: torch.device) -> Iterator[_Row]:
    for row in rows:
        index = span.start + row - span.begin
        if index < span.trunk:
            yield _Row(row - begin, index + 1, None)
        else:
            path = torch.tensor(span.paths[index - span.trunk], device=device)
            yield _Row(row - begin, span.trunk, path)


def _seen(kept: torch.Tensor, row: _Row, window: int | None) -> torch.Tensor:
    """What a row sees of keys or values [T, Hkv, D], in the order of positions: [Hkv, L, D]."""
    seen = kept[: row.trunk]
    if row.path is not None:
        seen = torch.cat([seen, kept[row.path]])
    # Cut last, so that it starts at the same address, up to alignment, whatever came before.
    if window is not None:
        seen = seen[max(len(seen) - window, 0) :]
    return seen.transpose(0, 1)


def _row_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: How) -> torch.Tensor:
    """softmax(q k^T * scaling) v of one row: q [Hkv, G, D], k, v [Hkv, L, D] to [Hkv, G, Dv]."""
    if how.softcap is None:
        # Four dimensions, because only then the fused kernel is used: it does not split its
        # sums over threads.
        return functional.scaled_dot_product_attention(
            q[None], k[None], v[None], scale=how.scaling
        )[0]
    scores = torch.matmul(q, k.transpose(1, 2)) * how.scaling
    scores = torch.tanh(scores / how.softcap) * how.softcap
    return torch.matmul(scores.softmax(-1), v)
