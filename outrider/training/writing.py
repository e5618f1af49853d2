"""Lets a model write many texts at once, sequences joining and leaving between steps.

A text is asked for by a *script*: a generator that yields a `Passage` to be written, is sent what
the model wrote, and goes on from there until it returns its `Example`. What a script
asks for continues what it asked for before, so that its KV is kept.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from outrider.messages import SamplingParams
from outrider.model.blocks import BLOCK_TOKENS, BlockTable
from outrider.model.paged import PagedModel, Segment
from outrider.sampling.coupled import target_tokens
from outrider.sampling.rows import Row
from outrider.training.corpus import Example


@dataclass(frozen=True, slots=True)
class Passage:
    """Tokens to continue, by up to `max_tokens`, an id of `stop_ids` being the last."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Written:
    """What the model wrote, and the hidden states float16 [tokens, hidden] it was made of."""

    token_ids: tuple[int, ...]
    hidden: torch.Tensor


Script = Generator[Passage, Written, Example]


@dataclass(slots=True, eq=False)
class _Seat:
    """A script that is being served, its passage and what is written of it."""

    script: Script
    passage: Passage
    table: BlockTable = field(default_factory=BlockTable)
    written: list[int] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Everything so far."""
        return [*self.passage.token_ids, *self.written]

    @property
    def missing(self) -> int:
        """Tokens without KV."""
        return len(self.passage.token_ids) + len(self.written) - self.table.kv_len

    @property
    def done(self) -> bool:
        """Whether the passage is whole."""
        if not self.written:
            return self.passage.max_tokens == 0
        whole = len(self.written) >= self.passage.max_tokens
        return whole or self.written[-1] in self.passage.stop_ids


class Writer:
    """Serves up to `seats` scripts at once; a step has about `step_tokens` rows at most."""

    def __init__(
        self, model: PagedModel, token_count: int, *, seats: int = 32, step_tokens: int = 256
    ) -> None:
        self._model = model
        self._token_count = token_count
        self._seats = seats
        self._step_tokens = step_tokens

    def run(self, scripts: Iterable[Script]) -> Iterator[Example]:
        """What the scripts return, in the order in which they end."""
        waiting = iter(scripts)
        serving: list[_Seat] = []
        while True:
            while len(serving) < self._seats:
                script = next(waiting, None)
                if script is None:
                    break
                serving.append(_Seat(script, next(script)))
            if not serving:
                return
            for seat in self._step(serving):
                example = self._turn(seat)
                if example is not None:
                    serving.remove(seat)
                    yield example

    def _step(self, serving: Sequence[_Seat]) -> list[_Seat]:
        """Run one step; the seats whose passage is whole."""
        budget = self._step_tokens
        taking: list[tuple[_Seat, list[int], bool]] = []
        for seat in sorted(serving, key=lambda seat: seat.missing):
            tokens = seat.tokens
            rest = len(tokens) - seat.table.kv_len
            feed = tokens[seat.table.kv_len :][: max(budget, 0)]
            if not feed:
                continue
            budget -= len(feed)
            self._model.pool.grow(seat.table, seat.table.kv_len + len(feed))
            taking.append((seat, feed, len(feed) == rest))
        output = self._model.step(
            [Segment(feed, seat.table, int(last)) for seat, feed, last in taking]
        )
        logits, hidden = output.logits[:, : self._token_count].float(), output.hidden.half()
        choosing = [seat for seat, _, last in taking if last]
        for seat, feed, _ in taking:
            seat.table.kv_len += len(feed)
        rows = [
            Row(seat.passage.sampling, seat.tokens, (), len(seat.passage.token_ids))
            for seat in choosing
        ]
        for seat, token, row in zip(choosing, target_tokens(logits, rows), hidden, strict=True):
            seat.written.append(token)
            seat.hidden.append(row)
        return [seat for seat in serving if seat.done]

    def _turn(self, seat: _Seat) -> Example | None:
        """Hand over what is written and take the next passage, or the example at the end."""
        before = seat.tokens
        try:
            seat.passage = seat.script.send(Written(tuple(seat.written), torch.stack(seat.hidden)))
        except StopIteration as end:
            self._model.pool.release(seat.table, keep=False)
            example: Example = end.value
            return example
        seat.written, seat.hidden = [], []
        kept = _common_prefix(before, seat.passage.token_ids)
        seat.table.kv_len = min(seat.table.kv_len, kept, len(seat.passage.token_ids) - 1)
        return None


def blocks_needed(seats: int, most_tokens: int) -> int:
    """KV blocks that so many texts of so many tokens take."""
    return seats * -(-most_tokens // BLOCK_TOKENS)


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length
