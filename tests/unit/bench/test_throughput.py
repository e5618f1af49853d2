"""Rates and bars of a comparison, from sides whose seconds are made up."""

from collections.abc import Sequence

import pytest

from bench.sides import Completed
from bench.throughput import measure, report_of


class Made:
    """Says its prompt's first token over and over, in made up seconds."""

    def __init__(self, name: str, seconds_a_token: float, odd: bool = False) -> None:
        self.name = name
        self.calls: list[tuple[tuple[int, ...], int]] = []
        self._seconds = seconds_a_token
        self._odd = odd

    def complete(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Completed:
        self.calls += [(tuple(prompt), new_tokens) for prompt in prompts]
        said = [[prompt[0] + self._odd * (prompt[0] == 2)] * new_tokens for prompt in prompts]
        return Completed(self._seconds * (new_tokens + 3), said)


def prompts(number: int) -> list[list[int]]:
    return [[number, 0], [number, 1]]


def test_rates_are_of_whole_calls_and_texts_are_compared() -> None:
    ours, theirs = Made("ours", 0.1), Made("theirs", 0.2, odd=True)
    results = measure([ours, theirs], prompts, new_tokens=5, rounds=3)
    # Two prompts of five tokens each in eight times 0.1 s.
    assert results["ours"].rates == pytest.approx([12.5] * 3)
    assert results["ours"].first_s == pytest.approx([0.4] * 3)
    assert results["ours"].step_s == pytest.approx([0.1] * 3)
    report = report_of("T", results, "ours", {"theirs": 1.9, "absent": 1.0})
    assert report.figures["theirs"]["outrider_over_it"]["median"] == pytest.approx(2.0)
    # In round 2 theirs says something else to both prompts.
    assert (report.figures["theirs"]["same_texts"], report.figures["theirs"]["texts"]) == (4, 6)
    assert [bar.met for bar in report.bars] == [True, False]
    assert report.bars[1].detail == "not measured"
    assert not report_of("T", results, "ours", {"theirs": 2.1}).bars[0].met


def test_no_two_calls_of_a_side_share_a_prompt_and_all_sides_get_the_same() -> None:
    ours, theirs = Made("ours", 0.1), Made("theirs", 0.2)
    measure([ours, theirs], prompts, new_tokens=5, rounds=3)
    said = [prompt for prompt, _ in ours.calls]
    assert len(said) == len(set(said)) == 2 * 2 * (3 + 1)
    assert sorted(ours.calls) == sorted(theirs.calls)
