"""The rows of a step as arrays that compiled code reads."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from outrider.model.compiled.step import ROW, TILE_ROW_LIMIT, TILE_ROWS
from outrider.model.rows import Span, StepRows

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepTable:
    """`rows` are of the type ROW, `tiles` of TILE_ROWS; `wanted` are rows whose logits are wanted.

    `kept` are the arrays that `rows` has the addresses of.
    """

    rows: npt.NDArray[Any]
    tiles: npt.NDArray[Any]
    wanted: Ints
    kept: list[Ints]

    @classmethod
    def of(cls, rows: StepRows) -> Self:
        """The table of a step."""
        tiles = [tile for span in rows.spans for tile in _tiles(span)]
        table = cls(
            np.zeros(len(rows.token_ids), ROW),
            np.array(tiles, dtype=TILE_ROWS),
            np.array(rows.wanted, dtype=np.int64),
            [],
        )
        table.rows["position"] = rows.positions
        for span in rows.spans:
            table._fill(span)
        return table

    def _fill(self, span: Span) -> None:
        part = self.rows[span.begin : span.end]
        blocks = self._keep(span.blocks)
        indices = np.arange(span.start, span.context)
        part["blocks"] = blocks.ctypes.data
        part["index"] = indices
        part["end"] = np.minimum(indices + 1, span.trunk)
        for row, path in zip(part[span.trunk - span.start :], span.paths, strict=True):
            indices = self._keep(path)
            row["path"], row["path_count"] = indices.ctypes.data, len(path)

    def _keep(self, numbers: Any) -> Ints:
        array = np.array(numbers, dtype=np.int64)
        self.kept.append(array)
        return array


def _tiles(span: Span) -> Iterator[tuple[int, int, int]]:
    for begin in range(span.begin, span.end, TILE_ROW_LIMIT):
        count = min(TILE_ROW_LIMIT, span.end - begin)
        yield begin, count, span.start + begin - span.begin + count
