"""Sides that take turns, and what is said of their figures: a median, its spread, ratios by round.

What one machine does at two moments differs more than most things that are compared. So the
sides of a comparison take turns (A B, B A, A B, ...) within one run, a ratio is taken within a
round, and the median over the rounds is what counts.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with the quartiles around it, over `count` values."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Of at least one value; one alone is its own quartiles."""
        ordered = sorted(values)
        low = high = statistics.median(ordered)
        if len(ordered) > 1:
            low, _, high = statistics.quantiles(ordered, n=4, method="inclusive")
        return cls(statistics.median(ordered), low, high, len(ordered))

    def times(self, factor: float) -> "Spread":
        """The same in another unit; `factor` is above 0."""
        return Spread(self.median * factor, self.low * factor, self.high * factor, self.count)

    def __str__(self) -> str:
        return f"{digits(self.median)} ({digits(self.low)}-{digits(self.high)})"


def digits(value: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def alternate(
    sides: Mapping[str, Callable[[int], T]], rounds: int, *, warm: int = 1
) -> dict[str, list[T]]:
    """Call every side once a round, with the number of the round, the order turning each time.

    `warm` more rounds come first, with negative numbers; what they give is dropped.
    """
    results: dict[str, list[T]] = {name: [] for name in sides}
    for number, name in turns(list(sides), rounds, warm=warm):
        result = sides[name](number)
        if number >= 0:
            results[name].append(result)
    return results


def turns(names: Sequence[str], rounds: int, *, warm: int = 1) -> Iterator[tuple[int, str]]:
    """Number of the round and whose turn it is, for what can't be a plain call; see `alternate`."""
    for number in range(-warm, rounds):
        for name in names if number % 2 == 0 else names[::-1]:
            yield number, name


def ratios(values: Sequence[float], over: Sequence[float]) -> Spread:
    """The ratio of two sides, taken within each round."""
    return Spread.of([value / base for value, base in zip(values, over, strict=True)])
