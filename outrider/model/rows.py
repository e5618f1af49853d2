"""The rows of a step: which token sits at which position, what it may see, what comes out.

A sequence's rows continue it as a chain; the last of them may form a tree. A row's *position*
is its depth in the text, its *index* is where its KV is kept, counted in tokens from the
start of the sequence. The two are the same in a chain. In a tree, siblings share a position,
so every row keeps its KV at the next index.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from outrider.model.blocks import BLOCK_TOKENS, BlockTable

NO_PARENT = -1


@dataclass(frozen=True, slots=True)
class Segment:
    """The rows of one sequence in a step.

    The KV of the rows goes to the indices `table.kv_len` and on. The table's blocks must hold
    them (`BlockPool.grow`). Logits are wanted for the last `logit_rows` of them.

    `parents` makes a tree of the last `len(parents)` rows: parents[i] is the row among those
    that row i follows, NO_PARENT for the row before them all, which is the last committed
    token. Without `parents` every row follows the one before it.
    """

    token_ids: Sequence[int]
    table: BlockTable
    logit_rows: int
    parents: Sequence[int] = ()


@dataclass(frozen=True)
class Span:
    """Rows [begin, end) of a step belong to one sequence; `start` tokens came before them."""

    begin: int
    end: int
    start: int
    blocks: Sequence[int]
    parents: Sequence[int] = ()

    def __post_init__(self) -> None:
        if len(self.parents) > self.rows:
            raise ValueError(f"a tree of {len(self.parents)} rows in a segment of {self.rows}")
        for row, parent in enumerate(self.parents):
            if not NO_PARENT <= parent < row:
                raise ValueError(f"row {row} of a tree can't follow row {parent}")

    @property
    def rows(self) -> int:
        """How many rows."""
        return self.end - self.begin

    @property
    def context(self) -> int:
        """Tokens whose KV is kept after the step, rejected ones and siblings included."""
        return self.start + self.rows

    @property
    def trunk(self) -> int:
        """Tokens that come before the tree: all of its rows see them."""
        return self.context - len(self.parents)

    @cached_property
    def paths(self) -> list[list[int]]:
        """For each row of the tree, the indices of its ancestors in the tree and of itself."""
        paths: list[list[int]] = []
        for row, parent in enumerate(self.parents):
            above = [] if parent == NO_PARENT else paths[parent]
            paths.append([*above, self.trunk + row])
        return paths

    @cached_property
    def positions(self) -> list[int]:
        """The position of each row."""
        return [
            *range(self.start, self.trunk),
            *(self.trunk + len(path) - 1 for path in self.paths),
        ]

    def slot(self, index: int) -> int:
        """Where in the pages, counted in tokens, the KV of `index` is kept."""
        return self.blocks[index // BLOCK_TOKENS] * BLOCK_TOKENS + index % BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class StepRows:
    """A step, flat: N tokens of several sequences. Logits are wanted for the rows `wanted`."""

    token_ids: list[int]
    positions: list[int]
    spans: list[Span]
    wanted: list[int]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step gives for each of its W wanted rows, in the model's own type.

    `logits` [W, V]; `hidden` [W, hidden] is what the head made them of. `hidden` may be a view
    of a buffer that the next step writes.
    """

    logits: torch.Tensor
    hidden: torch.Tensor


def flatten(segments: Sequence[Segment]) -> StepRows:
    """The segments one after the other.

    Raises:
        ValueError: the parents of a segment are no tree.
    """
    rows = StepRows([], [], [], [])
    for segment in segments:
        begin, table = len(rows.token_ids), segment.table
        end = begin + len(segment.token_ids)
        span = Span(begin, end, table.kv_len, table.blocks, segment.parents)
        rows.spans.append(span)
        rows.token_ids.extend(segment.token_ids)
        rows.positions.extend(span.positions)
        rows.wanted.extend(range(end - segment.logit_rows, end))
    return rows
