"""Rank 0 of a split model: to the rest of a verify worker it is a `PagedModel`.

Each step it tells the others what to run, in one message, and runs its own part. They need
not hear what was decided: the next message says which rows of KV are kept where.
"""

from collections.abc import Callable, Sequence

import torch

from outrider.errors import UnsupportedModelError
from outrider.model.blocks import BlockTable
from outrider.model.paged import moves_of
from outrider.model.parallel.choosing import chosen, sorted_rows
from outrider.model.parallel.member import Answer, Member
from outrider.model.parallel.messages import Kind, Order, Wanted, encode
from outrider.model.rows import Segment, StepOutput, flatten
from outrider.sampling.acceptance import TargetTokens
from outrider.sampling.coupled import Targets
from outrider.sampling.rows import Row
from outrider.sampling.scores import Choosing, Scores


class ParallelModel:
    """N ranks as one model; see `PagedModel` for what the methods do.

    Raises (all that run): RankLostError, when another rank is gone or stands still.
    """

    def __init__(self, member: Member, *, vocab_size: int, context_len: int) -> None:
        self.vocab_size = vocab_size
        self.context_len = context_len
        self.pool = member.paged.pool
        self._member = member
        self._moves: list[tuple[int, int]] = []
        # Called in each step when the others have what they need for it.
        self.on_sent: Callable[[], None] = _nothing

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Every row of logits whole: float32 [sum of logit_rows, vocab_size]."""
        return self.step(segments).logits.float()

    def step(self, segments: Sequence[Segment], inputs: torch.Tensor | None = None) -> StepOutput:
        """`forward`, with hidden states.

        Raises:
            UnsupportedModelError: `inputs` are given, which the other ranks don't get.
        """
        if inputs is not None:
            raise UnsupportedModelError("a split model takes tokens, not embeddings")
        rows = sum(segment.logit_rows for segment in segments)
        answer = self._run(segments, Wanted(self.vocab_size, range(rows)))
        return StepOutput(answer.whole, answer.hidden)

    def score(self, segments: Sequence[Segment], choosing: Choosing) -> Scores:
        """The step's rows of logits, brought together only where that is needed."""
        wanted = sorted_rows(choosing.rows, choosing.whole, choosing.token_count)
        return SpreadScores(self._run(segments, wanted), choosing.rows, wanted)

    def keep_path(self, table: BlockTable, rows: Sequence[int]) -> None:
        """Bring the KV of accepted rows together."""
        self.keep_paths([(table, rows)])

    def keep_paths(self, kept: Sequence[tuple[BlockTable, Sequence[int]]]) -> None:
        """`keep_path` for several sequences; the other ranks do it before their next step."""
        moves = moves_of(kept)
        self._member.paged.move(moves)
        self._moves += moves

    def pulse(self) -> None:
        """Make sure that every rank is there; for when there is nothing to run."""
        self._member.group.send(encode(Order(Kind.PULSE)))
        self._member.group.meet()

    def stop(self) -> None:
        """Let the other ranks end."""
        self._member.group.send(encode(Order(Kind.STOP)))

    def _run(self, segments: Sequence[Segment], wanted: Wanted) -> Answer:
        flatten(segments)  # refused here, nothing has been sent
        order = Order(Kind.STEP, segments, self._moves, wanted)
        self._member.group.send(encode(order))
        self._moves = []
        self.on_sent()
        try:
            answer = self._member.run(order)
        except Exception as error:
            # The others have run on: no step of theirs and ours would be the same any more.
            self._member.group.fail(f"rank 0 failed in a step: {error}")
            raise
        assert answer is not None, "rank 0 answers"
        return answer


def _nothing() -> None:
    """Nobody wants to know."""


class SpreadScores:
    """`Scores` of which some rows are whole and of others only the tokens are known."""

    def __init__(self, answer: Answer, rows: Sequence[Row], wanted: Wanted) -> None:
        self._whole = answer.whole.float()
        self._hidden = answer.hidden
        self._place = {row: place for place, row in enumerate(wanted.whole)}
        self._of_whole = Targets(self._whole, [rows[r] for r in wanted.whole])
        self._tokens: dict[int, int | None] = {}
        if answer.candidates:
            choices = chosen(answer.candidates, wanted)
            places = wanted.chosen_rows
            self._tokens.update(zip(places, choices.token_ids, strict=True))
            self._tokens.update((places[index], None) for index in choices.dead)

    @property
    def targets(self) -> TargetTokens:
        """This, by row."""
        return self

    def __getitem__(self, row: int) -> int | None:
        """The token of a row; None for a dead one."""
        return self._tokens[row] if row in self._tokens else self._of_whole[self._place[row]]

    def logits(self, begin: int, end: int) -> torch.Tensor:
        """Rows [begin, end), wanted whole."""
        return self._whole[[self._place[row] for row in range(begin, end)]]

    def broken(self, row: int) -> bool:
        """Whether a row's logits are NaN or infinite."""
        if row in self._tokens:
            # No constraint has a part in such a token.
            return self._tokens[row] is None
        return not bool(self._whole[self._place[row]].amax().isfinite())

    def hidden(self, rows: Sequence[int]) -> torch.Tensor:
        """What the head made rows of; every rank has all of it."""
        return self._hidden[list(rows)]
