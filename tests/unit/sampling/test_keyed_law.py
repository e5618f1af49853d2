"""Keyed noise gives the law of plain decoding, and every draft leaves the text as it is."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from outrider.messages import Endings, SamplingParams, SparseDistribution
from outrider.sampling import noise
from outrider.sampling.acceptance import Verdict, verdict
from outrider.sampling.noise import Stream
from outrider.sampling.proposal import draw
from outrider.sampling.rejection import KeyedChance, dense, verify_rejection
from tests.unit.sampling import keyed
from tests.unit.sampling.keyed import (
    Plan,
    Shape,
    assert_drawn_from,
    chain,
    decode,
    decode_by_rejection,
    plain,
)
from tests.unit.sampling.world import (
    KINDS,
    PROCESSED,
    Law,
    Task,
    Tokens,
    make_world,
    plain_law,
    processed_task,
)

BUSHY = (-1, -1, 0, 0, 1, 2, -1)


def mixed(seed: int, committed: Tokens, number: int) -> Sequence[Shape]:
    """Whatever can happen to a round, chosen by all that it may depend on."""
    return list(PLANS.values())[noise.key(seed, len(committed)) % len(PLANS)](
        seed, committed, number
    )


PLANS: dict[str, Plan] = {
    "k=1": lambda seed, committed, number: [chain(1)],
    "k=2": lambda seed, committed, number: [chain(2)],
    "k=3": lambda seed, committed, number: [chain(3)],
    "stranger": lambda seed, committed, number: [chain(3, drafter=1)],
    "spoiled": lambda seed, committed, number: [chain(3, spoiled={seed % 3})],
    "tree": lambda seed, committed, number: [Shape(BUSHY)],
    "tree of a stranger": lambda seed, committed, number: [Shape(BUSHY, drafter=1)],
    "spoiled tree": lambda seed, committed, number: [Shape(BUSHY, spoiled=frozenset({0, 3}))],
    "missing": lambda seed, committed, number: [chain(2 * (number % 2))],
    "stale": lambda seed, committed, number: [chain(2, base_lag=(number + seed) % 2)],
    "cut short": lambda seed, committed, number: [chain(3 - (seed + number) % 3)],
    "another drafter": lambda seed, committed, number: [chain(2, drafter=number % 2)],
    "another k": lambda seed, committed, number: [chain((committed[-1] + number) % 4)],
    "retried": lambda seed, committed, number: [chain(3), chain(2, drafter=1)],
    "retried plainly": lambda seed, committed, number: [Shape(BUSHY), chain(0)],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_law_of_a_million_keyed_draws(kind: str) -> None:
    # 5 kinds, 70,000 completions of 3 tokens each.
    task = Task(make_world(kind, 4, seed=1))
    assert_drawn_from(plain(task, range(70_000)), plain_law(task))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_any_draft_leaves_the_text_as_it_is(kind: str, plan: Plan) -> None:
    task = Task(make_world(kind, 5, seed=3))
    seeds = range(2**63, 2**63 + 150)
    assert decode(task, seeds, plan) == plain(task, seeds)


@pytest.mark.parametrize("vocab_size", [3, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_the_law_under_all_that_can_happen(kind: str, vocab_size: int) -> None:
    task = Task(make_world(kind, vocab_size, seed=5))
    completions = decode(task, range(2000), mixed)
    assert completions == plain(task, range(2000))
    assert_drawn_from(completions, plain_law(task))


@pytest.mark.parametrize("name", PROCESSED)
def test_the_law_with_every_processor(name: str) -> None:
    task = processed_task(name)
    completions = decode(task, range(1500), mixed)
    assert completions == plain(task, range(1500))
    assert_drawn_from(completions, plain_law(task))


@pytest.mark.parametrize("name", PROCESSED)
def test_greedy_with_every_processor(name: str) -> None:
    # The seed chooses what is drafted, and nothing else.
    task = processed_task(name, greedy=True)
    (text,) = set(plain(task, range(20)))
    assert set(decode(task, range(150), mixed)) == {text}


@pytest.mark.parametrize("kind", KINDS)
def test_greedy(kind: str) -> None:
    task = Task(make_world(kind, 5, seed=6), SamplingParams())
    (text,) = set(plain(task, range(20)))
    assert set(decode(task, range(150), mixed)) == {text}


def random_sampling(random: Random, vocab_size: int) -> SamplingParams:
    """Up to four processors with values from all of their range."""
    ids = range(vocab_size)
    values: dict[str, Any] = {
        "top_k": random.randint(1, vocab_size),
        "top_p": random.uniform(0.1, 1),
        "min_p": random.uniform(0, 0.5),
        "repetition_penalty": random.uniform(0.5, 3),
        "frequency_penalty": random.uniform(-2, 2),
        "presence_penalty": random.uniform(-2, 2),
        "logit_bias": tuple((token, random.uniform(-9, 9)) for token in random.sample(ids, 2)),
        "bad_words": tuple(tuple(random.choices(ids, k=1 + i % 3)) for i in range(3)),
        "min_tokens": random.randint(1, 6),
        "allowed_ids": tuple(random.sample(ids, 4)),
        "banned_ids": tuple(random.sample(ids, 2)),
    }
    names = random.sample(sorted(values), random.randint(0, 4))
    temperature = random.choice([0.0, 1e-6, 0.3, 1.0, 2.0, 1e3])
    return SamplingParams(temperature, **{name: values[name] for name in names})


@pytest.mark.parametrize("number", range(40))
def test_any_request_says_the_same_whatever_is_drafted(number: int) -> None:
    """Five seeds of each of 40 requests, 12 tokens, draft lengths from 0 to 8, trees too."""
    random = Random(number)
    world = make_world(random.choice(KINDS), 6, seed=number)
    stop_ids = frozenset(random.sample(range(6), random.randint(0, 2)))
    task = Task(world, random_sampling(random, 6), Endings(12, stop_ids))
    seeds = [random.getrandbits(64) for _ in range(5)]
    texts = plain(task, seeds)
    for k in (1, 4, 8):
        for drafter in (0, 1):
            assert decode(task, seeds, lambda *_, k=k, d=drafter: [chain(k, d)]) == texts
    hostile = chain(8, spoiled=range(8))
    assert decode(task, seeds, lambda seed, committed, round_number: [hostile]) == texts
    assert decode(task, seeds, mixed) == texts


# --- tests of the tests ---------------------------------------------------------------------


def trusting(draft: Sequence[int], parents: Sequence[int], targets: Sequence[int]) -> Verdict:
    """Accepts the first token of a draft unseen."""
    right = keyed.verify(draft, parents, targets)
    return verdict(draft[:1], targets[1], len(draft), whole=False) if draft else right


def shifted(draft: Sequence[int], parents: Sequence[int], targets: Sequence[int]) -> Verdict:
    """Compares each token with the row behind it."""
    return keyed.verify(draft, parents, [*targets[1:], targets[0]])


@pytest.mark.parametrize("wrong", [trusting, shifted])
def test_a_wrong_verdict_is_caught(wrong: keyed.Verify) -> None:
    task = Task(make_world("peaked", 5, seed=5))
    completions = decode(task, range(2000), PLANS["k=2"], wrong)
    assert completions != plain(task, range(2000))
    with pytest.raises(AssertionError, match="due"):
        assert_drawn_from(completions, plain_law(task))


def test_noise_that_repeats_at_every_position_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task(make_world("flat", 3))
    key = noise.key
    monkeypatch.setattr(noise, "key", lambda seed, position, stream: key(seed, 0, stream))
    with pytest.raises(AssertionError, match="due"):
        assert_drawn_from(plain(task, range(2000)), plain_law(task))


def test_a_wrong_temperature_is_caught() -> None:
    task = Task(make_world("equal", 3))
    warmer = replace(task, sampling=SamplingParams(temperature=1.2))
    with pytest.raises(AssertionError, match="due"):
        assert_drawn_from(plain(warmer, range(10_000)), plain_law(task))


# --- the rejection rule with the noise of production ------------------------------------------


def rejection_plan(committed: Tokens, number: int) -> tuple[int, int, int]:
    return (committed[-1] + number + 1) % 4, number % 2, (0, 2, 3)[committed[-1] % 3]


@pytest.mark.parametrize("kind", ["peaked", "flat", "zeros"])
def test_the_law_of_keyed_rejection(kind: str) -> None:
    """The same noise serves a position in a round and in the round that drafts it again."""
    task = Task(make_world(kind, 4, seed=8))
    completions = [decode_by_rejection(task, seed, rejection_plan) for seed in range(2000)]
    assert_drawn_from(completions, plain_law(task))


def one_token(seed: int) -> Tokens:
    """Token 2 is mostly replaced by 0 or 1, token 3 never."""
    q = SparseDistribution((2, 3), (1, 1))
    p = torch.tensor([[0.2, 0.2, 0.1, 0.5], [0.25, 0.25, 0.25, 0.25]], dtype=torch.float64)
    drafted = draw(q, seed, 7)
    verdict = verify_rejection([drafted], [dense(q, 4)], p, 7, KeyedChance(seed))
    return verdict.token_ids[:1]


ONE_TOKEN: Law = {(0,): 0.2, (1,): 0.2, (2,): 0.1, (3,): 0.5}


def test_the_law_of_one_keyed_rejection() -> None:
    assert_drawn_from([one_token(seed) for seed in range(2000)], ONE_TOKEN)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Stream.DRAFT, Stream.ACCEPT),
        (Stream.DRAFT, Stream.RESAMPLE),
        (Stream.ACCEPT, Stream.RESAMPLE),
    ],
)
def test_noise_that_serves_two_purposes_is_caught(
    monkeypatch: pytest.MonkeyPatch, one: Stream, other: Stream
) -> None:
    key = noise.key
    monkeypatch.setattr(
        noise,
        "key",
        lambda seed, position, stream: key(seed, position, one if stream is other else stream),
    )
    with pytest.raises(AssertionError, match="due"):
        assert_drawn_from([one_token(seed) for seed in range(2000)], ONE_TOKEN)
