"""The law of decoding with the rejection rule, by summing over every chance there is."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

from outrider.messages import SparseDistribution
from outrider.sampling.acceptance import Verdict
from outrider.sampling.endings import first_ending
from outrider.sampling.noise import Stream
from outrider.sampling.proposal import quantised
from outrider.sampling.rejection import Chance, dense, one_hot, verify_rejection
from outrider.sampling.rows import Row
from tests.unit.sampling.world import PROMPT, Law, Task, Tokens, distribution, logits


class Dice:
    """A `Chance` that follows a script, then takes the first way and notes the others."""

    def __init__(self, script: Tokens) -> None:
        self._script = script
        self._taken: Tokens = ()
        self.probability = 1.0
        self.others: list[Tokens] = []

    def choose(self, probabilities: Sequence[float]) -> int:
        """The index that this run takes."""
        assert abs(sum(probabilities) - 1) < 1e-12
        assert min(probabilities) >= 0
        step = len(self._taken)
        if step < len(self._script):
            way = self._script[step]
        else:
            way, *others = [i for i, p in enumerate(probabilities) if p > 0]
            self.others += [(*self._taken, other) for other in others]
        self._taken += (way,)
        self.probability *= probabilities[way]
        return way

    def accept(self, position: int, probability: float) -> bool:
        return self.choose((probability, 1 - probability)) == 0

    def draw(self, position: int, stream: Stream, p: torch.Tensor) -> int:
        return self.choose(p.tolist())


def outcomes(run: Callable[[Dice], Tokens]) -> Iterator[tuple[Tokens, float]]:
    """What a function of chance returns on each way through it, with the way's probability."""
    scripts: list[Tokens] = [()]
    while scripts:
        dice = Dice(scripts.pop())
        result = run(dice)
        scripts += dice.others
        yield result, dice.probability


@dataclass(frozen=True)
class Attempt:
    """One try at a round: who drafts how many tokens and reports how much of q.

    `q_top` None: the drafter proposes its best token, which has a one-hot q. `processes`:
    whether the drafter applies the session's processors. `arrives`: how many of its tokens
    are not cut off on the way. `stale`: it continues other tokens than those committed by
    now, and is dropped.
    """

    k: int
    drafter: int = 0
    q_top: int | None = 0
    processes: bool = True
    arrives: int = 100
    stale: bool = False


Plan = Callable[[Tokens, int], Sequence[Attempt]]
"""From the committed tokens and the number of the round to the tries at it; the last counts."""


@dataclass(frozen=True)
class Rules:
    """What is under test; a wrong rule has another function in one place.

    row: the row of a position. reported: the q that goes with a token, given the drafter's
    whole distribution and the one that was sampled from. verify: the verdict.
    """

    row: Callable[[Task, Tokens, Tokens], Row] = Task.row
    reported: Callable[[torch.Tensor, SparseDistribution], torch.Tensor] = field(
        default=lambda p, q: dense(q, len(p))
    )
    verify: Callable[
        [Sequence[int], Sequence[torch.Tensor], torch.Tensor, int, Chance], Verdict
    ] = verify_rejection


RIGHT = Rules()


def rejection_law(task: Task, plan: Plan, rules: Rules = RIGHT) -> Law:
    """The probability of each completion over whole decodings of many rounds."""
    target, vocab_size = task.world.target, task.world.vocab_size

    @cache
    def p_row(committed: Tokens, drafted: Tokens) -> torch.Tensor:
        return distribution(task, target, rules.row(task, committed, drafted))

    @cache
    def proposal(
        committed: Tokens, drafted: Tokens, attempt: Attempt
    ) -> tuple[Tokens, tuple[float, ...], torch.Tensor | None]:
        """The tokens that can be drafted next, their probabilities, and the q reported."""
        table = task.world.drafters[attempt.drafter]
        if attempt.processes:
            p = distribution(task, table, task.row(committed, drafted))
        else:
            p = logits(table, (*committed, *drafted)).softmax(-1)
        if attempt.q_top is None:
            return (int(p.argmax()),), (1.0,), None
        q = quantised(p, attempt.q_top)
        total = sum(q.weights)
        weights = tuple(weight / total for weight in q.weights)
        return q.token_ids, weights, rules.reported(p, q)

    def tried(dice: Dice, committed: Tokens, attempt: Attempt) -> Tokens:
        draft: Tokens = ()
        q = []
        for _ in range(attempt.k):
            tokens, weights, reported = proposal(committed, draft, attempt)
            token = tokens[dice.choose(weights)]
            q.append(one_hot(token, vocab_size) if reported is None else reported)
            draft += (token,)
        arrives = 0 if attempt.stale else attempt.arrives
        draft, q = draft[:arrives], q[:arrives]
        p = torch.stack([p_row(committed, draft[:i]) for i in range(len(draft) + 1)])
        verdict = rules.verify(draft, q, p, len(committed), dice)
        kept, _ = first_ending(verdict.token_ids, len(committed) - len(PROMPT), task.endings)
        return verdict.cut(kept).token_ids

    @cache
    def round_law(committed: Tokens, attempts: tuple[Attempt, ...]) -> Law:
        def run(dice: Dice) -> Tokens:
            return [tried(dice, committed, attempt) for attempt in attempts][-1]

        law: Law = {}
        for tokens, probability in outcomes(run):
            law[tokens] = law.get(tokens, 0.0) + probability
        return law

    @cache
    def rest(completion: Tokens, number: int) -> Law:
        """The law of what follows a completion that has taken `number` rounds."""
        if first_ending(completion, 0, task.endings)[1] is not None:
            return {(): 1.0}
        committed = (*PROMPT, *completion)
        law: Law = {}
        attempts = tuple(plan(committed, number))
        for tokens, probability in round_law(committed, attempts).items():
            for more, mass in rest((*completion, *tokens), number + 1).items():
                law[(*tokens, *more)] = law.get((*tokens, *more), 0.0) + probability * mass
        return law

    return rest((), 0)
