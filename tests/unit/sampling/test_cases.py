"""Faults that other engines met, at the level of the functions that decide."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from scipy import stats

from outrider.messages import Endings, SamplingParams, TokenOrigin
from outrider.sampling.acceptance import Verdict
from outrider.sampling.coupled import processed_scores, target_tokens, unusable_rows
from outrider.sampling.proposal import draw, quantised
from outrider.sampling.rejection import KeyedChance, dense, one_hot, residual, verify_rejection
from outrider.sampling.rows import Row
from tests.unit.sampling import keyed
from tests.unit.sampling.keyed import Plan, Shape, chain, decode, decode_by_rejection, plain
from tests.unit.sampling.world import PROMPT, Task, World, make_world

RECOVERED = TokenOrigin.RECOVERED


@pytest.mark.parametrize("k", [1, 3])
def test_case_03_a_target_that_always_rejects(k: int) -> None:
    """The recovered token is of the rejected row, and nothing after it survives."""
    # Row i of the target gives tokens 2i and 2i + 1, and no token that is drafted.
    p = torch.zeros(k + 1, 10, dtype=torch.float64)
    for row in range(k + 1):
        p[row, 2 * row : 2 * row + 2] = 0.5
    q = [one_hot(9, 10)] * k
    seen: Counter[tuple[int, ...]] = Counter()
    for seed in range(400):
        verdict = verify_rejection([9] * k, q, p, 5, KeyedChance(seed))
        assert verdict.origins == (RECOVERED,)
        assert (verdict.accepted, verdict.draft_tokens, verdict.path) == (0, k, ())
        seen[verdict.token_ids] += 1
    assert seen.keys() == {(0,), (1,)}
    assert stats.binomtest(seen[(0,)], 400).pvalue > 1e-3


@pytest.mark.slow
def test_case_08_the_law_is_the_processed_one_by_rejection() -> None:
    """Vocabulary of 5, top_k 2 on both sides, q of two tokens: what is reported is sampled."""
    sampling = SamplingParams(temperature=1.0, top_k=2)
    row = Row(sampling, (0, 0))
    logits = torch.tensor([[1.0, 2.0, 0.5, 1.7, -1.0], [1.9, 1.0, 0.5, 2.2, 0.0]])
    p, drafted = processed_scores(logits, [row, row]).softmax(-1)
    q = quantised(drafted, 2)
    assert set(q.token_ids) == {0, 3}
    counts: Counter[int] = Counter()
    for seed in range(50_000):
        token = draw(q, seed, row.position)
        verdict = verify_rejection(
            [token], [dense(q, 5)], torch.stack([p, p]), row.position, KeyedChance(seed)
        )
        counts[verdict.token_ids[0]] += 1
    due = torch.tensor([2.0, 1.7]).softmax(-1) * 50_000
    assert counts.keys() == {1, 3}
    assert stats.chisquare([counts[1], counts[3]], due.tolist()).pvalue > 1e-3


def test_case_09_equal_one_hots_leave_no_residual() -> None:
    p = one_hot(3, 5)
    assert torch.equal(residual(p, p), p)
    rows = torch.stack([p, p])
    for seed in range(50):
        verdict = verify_rejection([3], [p], rows, 0, KeyedChance(seed))
        assert verdict.token_ids == (3, 3)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(1.0, 3, 0.9, min_p=0.1)])
def test_case_09_what_is_not_a_number_is_named(bad: float, sampling: SamplingParams) -> None:
    logits = torch.zeros(4, 6)
    logits[1, 2] = bad
    assert unusable_rows(logits) == [1]
    rows = [Row(sampling, (0,))] * 4
    assert unusable_rows(processed_scores(logits, rows)) == [1]
    # The other rows are decided as ever.
    tokens = target_tokens(logits, rows)
    assert [tokens[r] for r in (0, 2, 3)] == target_tokens(torch.zeros(3, 6), rows[:3])


@pytest.mark.parametrize("temperature", [1e-5, 1e-6])
def test_case_12_a_tiny_temperature_is_greedy_by_either_rule(temperature: float) -> None:
    world = make_world("peaked", 5, seed=1)
    cold = Task(world, SamplingParams(temperature=temperature), Endings(12))
    (greedy,) = plain(replace(cold, sampling=SamplingParams()), [0])
    assert len(greedy) == 12
    seeds = range(20)
    assert set(decode(cold, seeds, lambda seed, committed, number: [chain(3)])) == {greedy}
    for seed in seeds:
        assert decode_by_rejection(cold, seed, lambda committed, number: (3, 0, 0)) == greedy


CHAINS: dict[str, Plan] = {
    f"k={k}": lambda seed, committed, number, k=k: [chain(k)]  # type: ignore[misc]
    for k in (0, 1, 3, 6)
}


@pytest.mark.parametrize("plan", CHAINS.values(), ids=CHAINS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_case_18_min_tokens(plan: Plan, temperature: float) -> None:
    """The stop id is barred for exactly 20 tokens, though nothing is likelier than it."""
    world = make_world("equal", 5)
    world.target[..., 4] = world.drafters[0][..., 4] = 40.0
    sampling = SamplingParams(temperature=temperature, min_tokens=20)
    task = Task(world, sampling, Endings(40, frozenset({4})))
    for text in decode(task, range(20), plan):
        assert len(text) == 21
        assert text.index(4) == 20


def test_case_18_min_tokens_by_rejection() -> None:
    world = make_world("equal", 5)
    world.target[..., 4] = world.drafters[1][..., 4] = 40.0
    task = Task(world, SamplingParams(1.0, min_tokens=20), Endings(40, frozenset({4})))
    for seed in range(20):
        text = decode_by_rejection(task, seed, lambda committed, number: (4, number % 2, 0))
        assert text.index(4) == 20


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "penalty",
    [
        {"frequency_penalty": 1.0},
        {"presence_penalty": 1.0},
        {"repetition_penalty": 3.0},
    ],
    ids=str,
)
def test_case_19_penalties_count_what_was_committed(
    penalty: dict[str, float], temperature: float
) -> None:
    """The draft is the target's own: all of it is accepted, and the text is the plain one."""
    sampling = SamplingParams(temperature, **penalty)  # type: ignore[arg-type]
    task = Task(make_world("equal", 6, seed=3), sampling, Endings(31))
    counted = [0, 0]

    def verify(draft: Sequence[int], parents: Sequence[int], targets: Sequence[int]) -> Verdict:
        verdict = keyed.verify(draft, parents, targets)
        counted[0] += verdict.accepted
        counted[1] += verdict.draft_tokens
        return verdict

    texts = decode(task, range(30), lambda seed, committed, number: [chain(4)], verify)
    assert counted[0] == counted[1] > 0
    assert texts == plain(task, range(30))
    # With tokens that are rejected on the way, too.
    spoiled = Shape(chain(4).parents, spoiled=frozenset({2}))
    assert decode(task, range(30), lambda seed, committed, number: [spoiled]) == texts
    unpenalised = replace(task, sampling=SamplingParams(temperature))
    assert plain(unpenalised, range(30)) != texts


def honoured(world: World, text: Sequence[int], best: torch.Tensor, min_p: float) -> bool:
    """Whether every token is barred nowhere and likely enough where it stands."""
    context = (*PROMPT, *text)
    for i, token in enumerate(text, start=len(PROMPT)):
        scores = world.target[context[i - 2], context[i - 1]].clone()
        scores[best] -= 100
        p = scores.softmax(-1)
        if token == best or p[token] < min_p * p.max():
            return False
    return True


@pytest.mark.parametrize("min_p", [0.0, 0.9])
def test_case_20_a_bias_and_min_p_hold_on_every_row(min_p: float) -> None:
    """What is barred is the drafter's favourite, which it goes on proposing regardless."""
    world = make_world("equal", 5, seed=2)
    world.drafters[1][..., 3] = 50.0
    sampling = SamplingParams(temperature=1.0, logit_bias=((3, -100.0),), min_p=min_p)
    task = Task(world, sampling, Endings(12))
    favourite = torch.tensor(3)
    texts = decode(task, range(40), lambda seed, committed, number: [chain(3, drafter=1)])
    texts += [
        decode_by_rejection(task, seed, lambda committed, number: (3, 1, 1)) for seed in range(40)
    ]
    assert all(honoured(world, text, favourite, min_p) for text in texts)
    unprocessed = replace(task, sampling=SamplingParams(1.0))
    assert not all(honoured(world, t, favourite, min_p) for t in plain(unprocessed, range(40)))
