"""Turns of two sides on the same prompts, compared."""

import pytest

from bench.turns import Compared, Turn, by_category, differences, median_rate, total_rate


def turn(tokens: int, seconds: float, first: int = 1) -> Turn:
    return Turn((first, *[1] * (tokens - 1)), seconds)


def test_ratios_are_by_prompt_and_in_total() -> None:
    off = [turn(10, 1.0), turn(10, 1.0), turn(40, 8.0)]
    on = [turn(10, 0.5), turn(10, 1.0), turn(40, 2.0)]
    compared = Compared.of(on, off)
    assert (compared.over.low, compared.over.median, compared.over.high) == (1.5, 2.0, 3.0)
    assert compared.in_total == pytest.approx((60 / 3.5) / (60 / 10))
    assert (median_rate(off), total_rate(off)) == (10.0, 6.0)


def test_the_first_difference_of_each_text_is_told() -> None:
    base = [Turn((1, 2, 3), 1.0), Turn((1, 2), 1.0), Turn((4, 5, 6), 1.0)]
    side = [Turn((1, 2, 3), 9.0), Turn((1, 2, 3), 1.0), Turn((4, 9, 6), 1.0)]
    assert differences(base, base) == []
    assert differences(side, base) == [
        {"prompt": 1, "at": 2, "token_ids": [3, None]},
        {"prompt": 2, "at": 1, "token_ids": [9, 5]},
    ]


def test_turns_by_category_and_all_of_them() -> None:
    sides = {"a": [turn(1, 1.0), turn(2, 1.0), turn(3, 1.0)]}
    found = by_category(["y", "x", "y"], sides, "all")
    lengths = {name: [len(t.token_ids) for t in of["a"]] for name, of in found.items()}
    assert lengths == {"x": [2], "y": [1, 3], "all": [1, 2, 3]}
    assert list(found) == ["x", "y", "all"]
