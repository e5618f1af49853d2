"""The rejection rule gives the target's own law: every completion, every chance, to 1e-9."""

import itertools

import pytest

from outrider.messages import SamplingParams
from tests.unit.sampling.enumeration import Attempt, Plan, rejection_law
from tests.unit.sampling.world import (
    HORIZON,
    KINDS,
    PROCESSED,
    PROMPT,
    Task,
    Tokens,
    assert_same_law,
    make_world,
    plain_law,
    processed_task,
)

# What a drafter reports: one sampled token, two, all of them; or its best one, for certain.
Q_TOPS = (1, 2, 0, None)


def left(committed: Tokens) -> int:
    return HORIZON - (len(committed) - len(PROMPT))


def always(k: int, drafter: int = 0, q_top: int | None = 0, *, processes: bool = True) -> Plan:
    """The same attempt in every round, never longer than what is left to decode."""
    return lambda committed, _: [
        Attempt(min(k, left(committed)), drafter, q_top, processes=processes)
    ]


@pytest.mark.parametrize("q_top", Q_TOPS)
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_law_is_the_targets(kind: str, k: int, q_top: int | None) -> None:
    for vocab_size, seed in itertools.product((3, 4, 5, 6), (k, k + 10)):
        task = Task(make_world(kind, vocab_size, seed))
        assert_same_law(rejection_law(task, always(k, q_top=q_top)), plain_law(task))


@pytest.mark.parametrize("q_top", Q_TOPS)
def test_a_drafter_that_knows_nothing(q_top: int | None) -> None:
    for kind in KINDS:
        task = Task(make_world(kind, 4, seed=9))
        assert_same_law(rejection_law(task, always(3, 1, q_top)), plain_law(task))


def test_a_draft_that_reaches_beyond_the_end() -> None:
    task = Task(make_world("peaked", 3))
    law = rejection_law(task, lambda committed, number: [Attempt(HORIZON + 1)])
    assert_same_law(law, plain_law(task))


def missing(committed: Tokens, number: int) -> list[Attempt]:
    return [Attempt(0 if number % 2 else 2)]


def stale(committed: Tokens, number: int) -> list[Attempt]:
    return [Attempt(2, stale=number % 2 == 0)]


def cut_short(committed: Tokens, number: int) -> list[Attempt]:
    return [Attempt(3, arrives=1 + number % 2)]


def changing_drafter(committed: Tokens, number: int) -> list[Attempt]:
    return [Attempt(2, drafter=number % 2, q_top=(0, None)[number % 2])]


def changing_k(committed: Tokens, number: int) -> list[Attempt]:
    # Adaptive: by what was committed, as a draft length from measured acceptance is.
    return [Attempt((committed[-1] + number) % 4, q_top=committed[-1] % 3)]


def retried(committed: Tokens, number: int) -> list[Attempt]:
    return [Attempt(1, q_top=2), Attempt(2, drafter=1)]


def retried_plainly(committed: Tokens, number: int) -> list[Attempt]:
    return [Attempt(2), Attempt(0)]


def all_of_it(committed: Tokens, number: int) -> list[Attempt]:
    plans = (retried, cut_short, changing_k, missing, changing_drafter, stale)
    return plans[(committed[-1] + number) % len(plans)](committed, number)


PATHS: list[Plan] = [
    missing,
    stale,
    cut_short,
    changing_drafter,
    changing_k,
    retried,
    retried_plainly,
    all_of_it,
]


@pytest.mark.parametrize("plan", PATHS)
@pytest.mark.parametrize("kind", ["peaked", "zeros", "disjoint"])
def test_the_paths_that_are_easily_forgotten(kind: str, plan: Plan) -> None:
    task = Task(make_world(kind, 4, seed=2), SamplingParams(temperature=0.9, presence_penalty=0.8))
    assert_same_law(rejection_law(task, plan), plain_law(task))


@pytest.mark.parametrize("processes", [True, False], ids=["processed", "raw"])
@pytest.mark.parametrize("q_top", [2, 0, None])
@pytest.mark.parametrize("name", PROCESSED)
def test_every_processor(name: str, q_top: int | None, processes: bool) -> None:
    task = processed_task(name)
    plan = always(2, q_top=q_top, processes=processes)
    assert_same_law(rejection_law(task, plan), plain_law(task))


@pytest.mark.parametrize("name", PROCESSED)
def test_every_processor_changes_the_law_here(name: str) -> None:
    task = processed_task(name)
    plain = Task(task.world, endings=task.endings)
    with pytest.raises(AssertionError, match="off by"):
        assert_same_law(plain_law(task), plain_law(plain), tolerance=0.01)
