"""Decoding in the tiny world with keyed noise, for many seeds in lock-step."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import torch
from scipy import stats

from outrider.messages import SamplingParams
from outrider.sampling.acceptance import Verdict, verify_chain, verify_tree
from outrider.sampling.coupled import target_tokens
from outrider.sampling.endings import first_ending
from outrider.sampling.proposal import draw, quantised
from outrider.sampling.rejection import KeyedChance, dense, verify_rejection
from outrider.sampling.rows import Row
from tests.unit.sampling.world import PROMPT, Law, Task, Tokens, distribution

# A false alarm in a million runs of a test, whatever the number of completions.
FALSE_ALARMS = 1e-6


@dataclass(frozen=True)
class Shape:
    """What is drafted in a round: `parents` of a chain or a tree, by which drafter.

    `spoiled` tokens of the draft are replaced by others that are not the drafter's guess.
    `base_lag`: how many tokens ago the draft was made; above 0 it is stale and dropped.
    """

    parents: tuple[int, ...] = ()
    drafter: int = 0
    spoiled: frozenset[int] = frozenset()
    base_lag: int = 0


def chain(k: int, drafter: int = 0, spoiled: Iterable[int] = (), base_lag: int = 0) -> Shape:
    return Shape(tuple(range(-1, k - 1)), drafter, frozenset(spoiled), base_lag)


Plan = Callable[[int, Tokens, int], Sequence[Shape]]
"""From seed, committed tokens and round to the tries at the round; the last one counts."""

RejectionPlan = Callable[[Tokens, int], tuple[int, int, int]]
"""From the committed tokens and the round to k, the drafter and q_top."""

Verify = Callable[[Sequence[int], Sequence[int], Sequence[int]], Verdict]


def verify(draft: Sequence[int], parents: Sequence[int], targets: Sequence[int]) -> Verdict:
    """By the function for chains where the draft is one."""
    if all(parent == i - 1 for i, parent in enumerate(parents)):
        return verify_chain(draft, targets)
    return verify_tree(draft, parents, targets)


@dataclass(eq=False)
class Session:
    sampling: SamplingParams
    completion: Tokens = ()
    rounds: int = 0
    ended: bool = False
    shape: Shape = Shape()
    draft: list[int] = field(default_factory=list)

    @property
    def committed(self) -> Tokens:
        return (*PROMPT, *self.completion)

    def path(self, node: int) -> Tokens:
        """The draft tokens from the root to a node, itself included; () for -1."""
        tokens: Tokens = ()
        while node >= 0:
            tokens = (self.draft[node], *tokens)
            node = self.shape.parents[node]
        return tokens


def decode(task: Task, seeds: Sequence[int], plan: Plan, verify: Verify = verify) -> list[Tokens]:
    """The completion of each seed, drafted and verified by the coupled rule."""
    sessions = [Session(replace(task.sampling, seed=seed)) for seed in seeds]
    while active := [session for session in sessions if not session.ended]:
        tries = [
            (session, plan(session.sampling.seed, session.committed, session.rounds))
            for session in active
        ]
        for attempt in range(max(len(shapes) for _, shapes in tries)):
            trying = [(session, shapes) for session, shapes in tries if attempt < len(shapes)]
            for session, shapes in trying:
                session.shape, session.draft = shapes[attempt], []
            _draft(task, [session for session, _ in trying])
            verdicts = _verdicts(task, [session for session, _ in trying], verify)
            for (session, shapes), verdict in zip(trying, verdicts, strict=True):
                # An attempt that is not the last one is lost before it is committed.
                if attempt == len(shapes) - 1:
                    _commit(task, session, verdict)
    return [session.completion for session in sessions]


def plain(task: Task, seeds: Sequence[int]) -> list[Tokens]:
    """The completion of each seed with nothing drafted."""
    return decode(task, seeds, lambda seed, committed, number: [Shape()])


def _tokens(table: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    if not rows:
        return []
    contexts = torch.tensor([(*row.committed, *row.drafted)[-2:] for row in rows])
    return target_tokens(table[contexts[:, 0], contexts[:, 1]], rows)


def _row(task: Task, session: Session, drafted: Tokens) -> Row:
    stop_ids = task.endings.stop_ids
    return Row(session.sampling, session.committed, drafted, len(PROMPT), stop_ids)


def _draft(task: Task, sessions: Sequence[Session]) -> None:
    """One node a step; siblings after the first, and spoiled tokens, are other tokens."""
    vocab_size = task.world.vocab_size
    for node in range(max((len(s.shape.parents) for s in sessions), default=0)):
        drafting = [s for s in sessions if node < len(s.shape.parents)]
        for drafter, table in enumerate(task.world.drafters):
            own = [s for s in drafting if s.shape.drafter == drafter]
            rows = [_row(task, s, s.path(s.shape.parents[node])) for s in own]
            for session, token in zip(own, _tokens(table, rows), strict=True):
                parents = session.shape.parents
                other = parents[:node].count(parents[node]) + (node in session.shape.spoiled)
                session.draft.append((token + other) % vocab_size)


def _verdicts(task: Task, sessions: Sequence[Session], verify: Verify) -> list[Verdict]:
    for session in sessions:
        if session.shape.base_lag:
            session.shape, session.draft = Shape(), []
    rows = [
        _row(task, session, session.path(node))
        for session in sessions
        for node in range(-1, len(session.draft))
    ]
    targets = iter(_tokens(task.world.target, rows))
    return [
        verify(session.draft, session.shape.parents, list(islice(targets, len(session.draft) + 1)))
        for session in sessions
    ]


def _commit(task: Task, session: Session, verdict: Verdict) -> None:
    kept, ending = first_ending(verdict.token_ids, len(session.completion), task.endings)
    session.completion += verdict.cut(kept).token_ids
    session.rounds += 1
    session.ended = ending is not None


def decode_by_rejection(task: Task, seed: int, plan: RejectionPlan) -> Tokens:
    """The completion of one seed by the rejection rule, with the noise of production."""
    task = replace(task, sampling=replace(task.sampling, seed=seed))
    vocab_size, chance = task.world.vocab_size, KeyedChance(seed)
    completion: Tokens = ()
    number, ended = 0, False
    while not ended:
        committed = (*PROMPT, *completion)
        k, drafter, q_top = plan(committed, number)
        draft: list[int] = []
        q = []
        for position in range(len(committed), len(committed) + k):
            row = task.row(committed, tuple(draft))
            proposed = quantised(distribution(task, task.world.drafters[drafter], row), q_top)
            draft.append(draw(proposed, seed, position))
            q.append(dense(proposed, vocab_size))
        p = torch.stack(
            [
                distribution(task, task.world.target, task.row(committed, tuple(draft[:i])))
                for i in range(k + 1)
            ]
        )
        verdict = verify_rejection(draft, q, p, len(committed), chance)
        kept, ending = first_ending(verdict.token_ids, len(completion), task.endings)
        completion += verdict.cut(kept).token_ids
        number, ended = number + 1, ending is not None
    return completion


def assert_drawn_from(completions: Sequence[Tokens], law: Law) -> None:
    """Each completion came as often as exact binomial bounds allow, all of them together."""
    counts, total = Counter(completions), len(completions)
    impossible = counts.keys() - law.keys()
    assert not impossible, f"{impossible} can't occur"
    level = FALSE_ALARMS / len(law)
    for tokens, mass in law.items():
        pvalue = stats.binomtest(counts[tokens], total, min(mass, 1.0)).pvalue
        assert pvalue >= level, f"{tokens}: {counts[tokens]} of {total}, {mass * total:.1f} due"
