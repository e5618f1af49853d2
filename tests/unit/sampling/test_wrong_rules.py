"""Tests of the tests: rules that are wrong in one place don't pass the exact enumeration."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from outrider.messages import SamplingParams, SparseDistribution
from outrider.sampling import rejection
from outrider.sampling.acceptance import Verdict, verdict
from outrider.sampling.noise import Stream
from outrider.sampling.rejection import Chance, acceptance_probability, residual
from outrider.sampling.rows import Row
from tests.unit.sampling.enumeration import Attempt, Plan, Rules, rejection_law
from tests.unit.sampling.world import (
    Task,
    Tokens,
    assert_same_law,
    make_world,
    plain_law,
    processed_task,
)

Distributions = Sequence[torch.Tensor]


def plan(q_top: int | None) -> Plan:
    return lambda committed, number: [Attempt(2, q_top=q_top)]


def softmaxed(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p - q).clamp_min(0.0).softmax(-1)


def of_absolute_differences(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    rest = (p - q).abs()
    return rest / rest.sum() if rest.sum() > 0 else p


def the_other_way_round(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return residual(q, p)


def without_residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return p


@pytest.mark.parametrize(
    "broken", [softmaxed, of_absolute_differences, the_other_way_round, without_residual]
)
def test_a_wrong_residual_is_caught(
    monkeypatch: pytest.MonkeyPatch,
    broken: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    task = Task(make_world("peaked", 4))
    monkeypatch.setattr(rejection, "residual", broken)
    with pytest.raises(AssertionError, match="off by"):
        assert_same_law(rejection_law(task, plan(2)), plain_law(task))


def inverted(p: torch.Tensor, q: torch.Tensor, token: int) -> float:
    return acceptance_probability(q, p, token)


def always(p: torch.Tensor, q: torch.Tensor, token: int) -> float:
    return 1.0


def target_only(p: torch.Tensor, q: torch.Tensor, token: int) -> float:
    return float(p[token])


@pytest.mark.parametrize("broken", [inverted, always, target_only])
def test_a_wrong_acceptance_is_caught(
    monkeypatch: pytest.MonkeyPatch, broken: Callable[[torch.Tensor, torch.Tensor, int], float]
) -> None:
    task = Task(make_world("peaked", 4))
    monkeypatch.setattr(rejection, "acceptance_probability", broken)
    with pytest.raises(AssertionError, match="off by"):
        assert_same_law(rejection_law(task, plan(2)), plain_law(task))


def before_truncation(p: torch.Tensor, q: SparseDistribution) -> torch.Tensor:
    return p


def without_weights(p: torch.Tensor, q: SparseDistribution) -> torch.Tensor:
    ids = torch.tensor(q.token_ids)
    return torch.zeros_like(p).scatter_(0, ids, 1.0 / len(ids))


@pytest.mark.parametrize(
    ("reported", "q_top"),
    [
        (before_truncation, 2),
        # All tokens are there, and their weights are off by no more than their rounding.
        (before_truncation, 0),
        (without_weights, 2),
    ],
    ids=["before truncation", "before quantisation", "without weights"],
)
def test_a_q_that_was_not_sampled_from_is_caught(
    reported: Callable[[torch.Tensor, SparseDistribution], torch.Tensor], q_top: int
) -> None:
    task = Task(make_world("peaked", 4))
    with pytest.raises(AssertionError, match="off by"):
        assert_same_law(rejection_law(task, plan(q_top), Rules(reported=reported)), plain_law(task))


def verifying(
    p_row: int = 0, q_row: int = 0, bonus_row: int = 0, skipped: int = 0
) -> Callable[[Sequence[int], Distributions, torch.Tensor, int, Chance], Verdict]:
    """The rule with its residual from rows that are off by so many, or a row never judged."""

    def verify(
        draft: Sequence[int], q: Distributions, p: torch.Tensor, position: int, chance: Chance
    ) -> Verdict:
        for i, token in enumerate(draft):
            probability = 1.0 if i < skipped else acceptance_probability(p[i], q[i], token)
            if not chance.accept(position + i, probability):
                left = residual(p[(i + p_row) % len(p)], q[(i + q_row) % len(q)])
                token = chance.draw(position + i, Stream.RESAMPLE, left)
                return verdict(draft[:i], token, len(draft), whole=False)
        last = chance.draw(position, Stream.TARGET, p[max(len(draft) + bonus_row, 0)])
        return verdict(draft, last, len(draft), whole=True)

    return verify


def test_the_same_written_again_is_right() -> None:
    task = Task(make_world("peaked", 4))
    law = rejection_law(task, plan(2), Rules(verify=verifying()))
    assert_same_law(law, plain_law(task))


@pytest.mark.parametrize(
    "off", [{"p_row": 1}, {"q_row": 1}, {"p_row": -1}, {"bonus_row": -1}, {"skipped": 1}], ids=str
)
def test_a_wrong_row_is_caught(off: dict[str, int]) -> None:
    task = Task(make_world("peaked", 4))
    with pytest.raises(AssertionError, match="off by"):
        assert_same_law(
            rejection_law(task, plan(0), Rules(verify=verifying(**off))), plain_law(task)
        )


def forgets_the_draft(task: Task, committed: Tokens, drafted: Tokens) -> Row:
    """The penalties see the committed tokens; the logits are those after the draft."""
    sampling = task.sampling
    unpenalised = SamplingParams(temperature=sampling.temperature)
    row = task.row(committed, drafted)
    return row if not drafted else replace(row, sampling=unpenalised)


def forgets_the_prompt_len(task: Task, committed: Tokens, drafted: Tokens) -> Row:
    return replace(task.row(committed, drafted), prompt_len=0)


def forgets_the_stop_ids(task: Task, committed: Tokens, drafted: Tokens) -> Row:
    return replace(task.row(committed, drafted), stop_ids=frozenset())


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("repetition_penalty", forgets_the_draft),
        ("frequency_penalty", forgets_the_draft),
        ("bad_words", forgets_the_draft),
        ("min_tokens", forgets_the_draft),
        ("frequency_penalty", forgets_the_prompt_len),
        ("min_tokens", forgets_the_prompt_len),
        ("min_tokens", forgets_the_stop_ids),
    ],
)
def test_a_wrong_context_is_caught(name: str, row: Callable[[Task, Tokens, Tokens], Row]) -> None:
    task = processed_task(name)
    with pytest.raises(AssertionError, match="off by"):
        assert_same_law(rejection_law(task, plan(0), Rules(row=row)), plain_law(task))
