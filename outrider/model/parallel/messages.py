"""What rank 0 tells the others each step: one message, of 4 bytes for each token, block and row.

Layout, little endian: a header of eight int32, then int32 numbers (every segment's figures,
tokens, blocks and parents; moves; rows), then keys of noise as uint64 and temperatures as
float64.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from outrider.model.blocks import BlockTable
from outrider.model.rows import Segment

_HEADER = 8


class Kind(IntEnum):
    """What is to be done; a FIRST step is one at start, for which ranks have longer."""

    STEP = 0
    PULSE = 1
    STOP = 2
    FIRST = 3


@dataclass(frozen=True, slots=True)
class Drawn:
    """A row whose token is drawn with a temperature alone.

    `key` is that of its noise (`outrider.sampling.noise.key`).
    """

    row: int
    key: int
    temperature: float


@dataclass(frozen=True, slots=True)
class Wanted:
    """What becomes of the rows of logits, by their place among all that a step gives.

    `whole` rows are brought together on rank 0, with their first `token_count` tokens; of
    `greedy` and `drawn` rows every rank gives its best token. Ids from `token_count` on are
    never chosen.
    """

    token_count: int
    whole: Sequence[int] = ()
    greedy: Sequence[int] = ()
    drawn: Sequence[Drawn] = ()

    @property
    def chosen_rows(self) -> list[int]:
        """The greedy rows, then the drawn ones."""
        return [*self.greedy, *(drawn.row for drawn in self.drawn)]


@dataclass(frozen=True, slots=True)
class Order:
    """One message; `moves` are (from, to) slots of KV to copy before the step's rows run."""

    kind: Kind
    segments: Sequence[Segment] = ()
    moves: Sequence[tuple[int, int]] = ()
    wanted: Wanted = field(default_factory=lambda: Wanted(0))


def encode(order: Order) -> bytes:
    """The bytes of an order."""
    numbers: list[int] = []
    for segment in order.segments:
        table = segment.table
        numbers += [
            len(segment.token_ids),
            len(table.blocks),
            len(segment.parents),
            segment.logit_rows,
            table.kv_len,
            *segment.token_ids,
            *table.blocks,
            *segment.parents,
        ]
    for move in order.moves:
        numbers += move
    wanted = order.wanted
    numbers += [*wanted.whole, *wanted.greedy, *(drawn.row for drawn in wanted.drawn)]
    header = [
        int(order.kind),
        len(order.segments),
        len(order.moves),
        wanted.token_count,
        len(wanted.whole),
        len(wanted.greedy),
        len(wanted.drawn),
        len(numbers),
    ]
    keys = np.array([drawn.key for drawn in wanted.drawn], "<u8")
    temperatures = np.array([drawn.temperature for drawn in wanted.drawn], "<f8")
    return np.array(header + numbers, "<i4").tobytes() + keys.tobytes() + temperatures.tobytes()


def decode(message: bytes) -> Order:
    """The order in a message that `encode` made."""
    kind, segments, moves, token_count, *counts, length = np.frombuffer(
        message, "<i4", _HEADER
    ).tolist()
    numbers = _Numbers(np.frombuffer(message, "<i4", length, 4 * _HEADER).tolist())
    end = 4 * (_HEADER + length)
    whole, greedy, drawn = counts
    keys = np.frombuffer(message, "<u8", drawn, end).tolist()
    temperatures = np.frombuffer(message, "<f8", drawn, end + 8 * drawn).tolist()
    return Order(
        Kind(kind),
        [numbers.segment() for _ in range(segments)],
        list(numbers.pairs(moves)),
        Wanted(
            token_count,
            numbers.take(whole),
            numbers.take(greedy),
            [Drawn(*each) for each in zip(numbers.take(drawn), keys, temperatures, strict=True)],
        ),
    )


class _Numbers:
    """The numbers of a message, taken one after the other."""

    def __init__(self, numbers: list[int]) -> None:
        self._numbers = numbers
        self._at = 0

    def take(self, count: int) -> list[int]:
        taken = self._numbers[self._at : self._at + count]
        self._at += count
        return taken

    def pairs(self, count: int) -> Iterator[tuple[int, int]]:
        flat = self.take(2 * count)
        return zip(flat[::2], flat[1::2], strict=True)

    def segment(self) -> Segment:
        tokens, blocks, parents, logit_rows, kv_len = self.take(5)
        token_ids = self.take(tokens)
        table = BlockTable(self.take(blocks), kv_len)
        return Segment(token_ids, table, logit_rows, self.take(parents))
