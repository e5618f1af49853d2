"""Turns alternate, warm-up rounds are dropped, and ratios are taken within a round."""

from collections.abc import Callable

import pytest

from bench.rounds import Spread, alternate, digits, ratios


def test_sides_take_turns_and_the_order_turns_each_round() -> None:
    calls: list[tuple[str, int]] = []

    def side(name: str) -> Callable[[int], str]:
        def one(number: int) -> str:
            calls.append((name, number))
            return f"{name}{number}"

        return one

    results = alternate({"a": side("a"), "b": side("b")}, 3, warm=1)
    assert [name for name, _ in calls] == ["b", "a", "a", "b", "b", "a", "a", "b"]
    assert [number for _, number in calls] == [-1, -1, 0, 0, 1, 1, 2, 2]
    assert results == {"a": ["a0", "a1", "a2"], "b": ["b0", "b1", "b2"]}


def test_a_spread_is_the_median_between_the_quartiles() -> None:
    spread = Spread.of([5.0, 1.0, 2.0, 100.0, 3.0])
    assert (spread.low, spread.median, spread.high, spread.count) == (2.0, 3.0, 5.0, 5)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0, 1)
    assert spread.times(1000.0) == Spread(3000.0, 2000.0, 5000.0, 5)


def test_a_ratio_is_taken_within_each_round() -> None:
    # A machine that is ten times slower in the second round changes no ratio.
    assert ratios([2.0, 20.0, 2.0], [1.0, 10.0, 1.0]) == Spread(2.0, 2.0, 2.0, 3)
    with pytest.raises(ValueError, match="shorter"):
        ratios([1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    ("value", "shown"), [(4327.3, "4327"), (99.94, "99.9"), (1.2345, "1.23"), (0.012345, "0.0123")]
)
def test_three_digits_and_no_exponent(value: float, shown: str) -> None:
    assert digits(value) == shown


def test_a_spread_is_shown_with_its_quartiles() -> None:
    assert str(Spread(1.5, 1.0, 2000.0, 9)) == "1.5 (1-2000)"
