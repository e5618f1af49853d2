"""What a check says, and when it fails."""

import json

import pytest

from outrider.exactness.checks import acceptance, distribution, first_difference, parity
from outrider.exactness.outcomes import Drawn
from outrider.figures import SpeculationFigures

EXPECTED = [(1, 2, 3), (4, 5, 6), (7, 8)]


def test_equal_answers_pass() -> None:
    check = parity("p", list(EXPECTED), EXPECTED, lambda *_: 0.0, 1e-3)
    assert check.passed
    assert check.summary == "3 of 3 answers equal (8 tokens)"
    assert check.figures["mismatches"] == check.figures["ties"] == 0


def test_the_first_mismatch_is_told_with_its_margin() -> None:
    said = [(1, 2, 3), (4, 9, 6), (7,)]
    asked: list[tuple[int, int]] = []

    def margin_at(answer: int, index: int) -> float:
        asked.append((answer, index))
        return 0.25

    check = parity("p", said, EXPECTED, margin_at, 1e-3)
    assert not check.passed
    assert asked == [(1, 1), (2, 1)]
    assert check.figures["mismatches"] == 2
    assert check.figures["first"] == {"answer": 1, "index": 1, "margin": 0.25}
    assert "answer 2 differs first at token 1: 9 instead of 5" in check.summary
    assert "0.25 apart" in check.summary
    json.dumps(check.figures)


def test_a_near_tie_is_no_failure_but_a_fault_beside_it_is() -> None:
    said = [(1, 2, 4), (4, 5, 6), (7, 9)]
    margins = {0: 1e-6, 2: 1e-6}
    check = parity("p", said, EXPECTED, lambda answer, _: margins[answer], 1e-3)
    assert check.passed
    assert (check.figures["mismatches"], check.figures["ties"]) == (0, 2)
    assert "near tie" in check.summary
    margins[2] = 0.1
    check = parity("p", said, EXPECTED, lambda answer, _: margins[answer], 1e-3)
    assert not check.passed
    assert (check.figures["mismatches"], check.figures["ties"]) == (1, 1)
    assert check.figures["first"]["answer"] == 2
    # A margin that can't be told is no excuse.
    assert not parity("p", said, EXPECTED, lambda *_: float("nan"), 1e-3).passed


def test_an_answer_that_is_too_short_or_too_long_differs() -> None:
    assert first_difference((1, 2), (1, 2)) is None
    assert first_difference((1, 2), (1, 2, 3)) == 2
    assert first_difference((1, 2, 3), (1, 2)) == 2
    assert first_difference((3,), (1,)) == 0
    check = parity("p", [(1, 2)], [(1, 2, 3)], lambda *_: 1.0, 1e-3)
    assert "the end instead of 3" in check.summary


@pytest.mark.parametrize(("heads", "passed"), [(510, True), (700, False)])
def test_distribution(heads: int, passed: bool) -> None:
    drawn = Drawn([(0,)] * heads + [(1,)] * (1000 - heads))
    drawn.figures.add_round(4, 2)
    check = distribution("d", drawn, {(0,): 0.5, (1,): 0.5}, 0.001)
    assert check.passed is passed
    assert check.figures["samples"] == 1000
    assert check.figures["draft_tokens"] == 4
    assert f"p-value {check.figures['p_value']:.3g}" in check.summary
    assert check.figures["detectable_shift"] == pytest.approx(0.0723, abs=1e-4)
    assert "a shift of 7.2% of the outcomes" in check.summary


def test_a_distribution_that_is_too_flat_to_be_tested_fails_with_advice() -> None:
    drawn = Drawn([(n,) for n in range(100)])
    check = distribution("d", drawn, {}, 0.001)
    assert not check.passed
    assert "nothing was tested" in check.summary
    assert "top-k" in check.summary
    json.dumps(check.figures, allow_nan=False)


def test_acceptance_without_drafts_fails() -> None:
    assert not acceptance(SpeculationFigures(rounds=3)).passed
    figures = SpeculationFigures()
    figures.add_round(4, 2)
    check = acceptance(figures)
    assert check.passed
    assert "2 of 4 drafted tokens accepted (50.0%)" in check.summary
