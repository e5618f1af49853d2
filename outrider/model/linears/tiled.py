"""The one place where a model's linear layers are replaced.

Here by layers that run in fixed tiles of rows, so that a row's result does not depend on how
many rows there are. A matrix product picks its kernel, and with it the order of its sums, by
shape; within one shape every row goes through the same arithmetic. That last point is
measured for each weight at load, not taken on trust.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

# Heights of a tile that are tried.
TILE_ROWS = (32, 16, 8, 4, 2, 1)
# Whose bits are the reference: the first of these that passes. Each worker must come to the
# same choice, so it does not depend on measured times; 16 rows keep the sums vectorised and
# cost little more than one row where weights are read from memory.
_ANCHORS = (16, 8, 4, 2, 1)
_LINEAR_TYPES = (torch.nn.Linear, Conv1D)

RowFunction = Callable[[torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class LiveRows:
    """How many of the rows that a linear gets matter: the first `live` of exactly `padded`.

    Inputs of another height (0: all inputs) are computed in full.
    """

    padded: int = 0
    live: int = 0

    def of(self, rows: int) -> int:
        """Rows to compute of an input of `rows` rows."""
        return self.live if rows == self.padded else rows


class TiledLinear(torch.nn.Module):
    """A linear layer in tiles of fixed heights, whose results have equal bits at any of them.

    Rows that are not live come out as zeros or as whatever their tile gave.
    """

    def __init__(self, inner: torch.nn.Module, heights: Sequence[int], live: LiveRows) -> None:
        super().__init__()
        self.inner = inner
        self._heights = sorted(heights)
        self._live = live

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X [..., K] to [..., N]."""
        flat = x.reshape(-1, x.shape[-1])
        live = self._live.of(len(flat))
        tiles = []
        begin = 0
        while begin < live:
            tile = flat[begin : begin + self._height(live - begin)]
            height = self._height(len(tile))
            result = self.inner(_padded(tile, height))
            tiles.append(result[: len(tile)])
            begin += len(tile)
        out = tiles[0] if len(tiles) == 1 else torch.cat(tiles)
        return _padded(out, len(flat)).view(*x.shape[:-1], -1)

    def _height(self, rows: int) -> int:
        """The lowest tile that holds `rows` rows, else the highest."""
        return next((h for h in self._heights if h >= rows), self._heights[-1])

    def __getattr__(self, name: str) -> Any:
        """Weight, bias and the like are those of the layer inside."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    return x if len(x) == rows else functional.pad(x, (0, 0, 0, rows - len(x)))


def tile_linears(module: torch.nn.Module, live: Callable[[torch.nn.Module], LiveRows]) -> None:
    """Replace every linear layer in `module` by a tiled one; `live` tells whose rows it follows.

    Layers with weights of one shape share one measurement.
    """
    heights: dict[object, tuple[int, ...]] = {}
    found = [
        (parent, name, child)
        for parent in module.modules()
        if not isinstance(parent, TiledLinear)
        for name, child in parent.named_children()
        if isinstance(child, _LINEAR_TYPES)
    ]
    for parent, name, child in found:
        weight: Any = child.weight
        kind = (type(child), weight.shape, weight.stride(), weight.dtype, child.bias is None)
        if kind not in heights:
            columns = weight.shape[0] if isinstance(child, Conv1D) else weight.shape[1]
            heights[kind] = equal_heights(child, columns, weight.dtype, weight.device)
        setattr(parent, name, TiledLinear(child, heights[kind], live(child)))


@torch.inference_mode()
def equal_heights(
    function: RowFunction, columns: int, dtype: torch.dtype, device: torch.device
) -> tuple[int, ...]:
    """Tile heights at which a row of `function` [R, columns] -> [R, N] has equal bits.

    That is: at every position in the tile, whatever the other rows hold, at any of the
    heights, and with one, two or the present number of threads. Where no height passes with
    other numbers of threads, with the present number alone; a height of 1 then always does.
    """
    generator = torch.Generator().manual_seed(0)
    most = max(TILE_ROWS)
    rows = torch.randn(most, columns, generator=generator).to(device, dtype)
    present = torch.get_num_threads()
    for threads in (sorted({1, 2, present}), [present]):
        for anchor in _ANCHORS:
            expected = _in_tiles(function, rows, anchor)
            equal = tuple(h for h in TILE_ROWS if _agrees(function, rows, h, threads, expected))
            if anchor in equal:
                return equal
    return (1,)


def _agrees(
    function: RowFunction,
    rows: torch.Tensor,
    height: int,
    threads: Sequence[int],
    expected: torch.Tensor,
) -> bool:
    """Whether every row has the expected bits, at each place in tiles of `height` rows."""
    for count in threads:
        with torch_threads(count):
            # The shift moves every row to the next place, among other neighbours.
            for shift in (0, 1) if height > 1 else (0,):
                shifted = _in_tiles(function, rows.roll(shift, 0), height).roll(-shift, 0)
                if not torch.equal(shifted, expected):
                    return False
    return True


def _in_tiles(function: RowFunction, rows: torch.Tensor, height: int) -> torch.Tensor:
    return torch.cat([function(tile.clone()) for tile in torch.split(rows, height)])


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Run with `count` threads of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
