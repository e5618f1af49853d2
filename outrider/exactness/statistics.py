"""Pearson's chi-square test of drawn outcomes against a law that is known exactly."""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

# The textbook's bound below which the statistic is no longer distributed as chi-square.
LEAST_EXPECTED = 5.0

Outcome = TypeVar("Outcome", bound=Hashable)


@dataclass(frozen=True, slots=True)
class ChiSquare:
    """The statistic over `classes` classes and the probability of one at least that large.

    `likeliest` is the share of the outcomes that is expected in the largest class.
    """

    statistic: float
    classes: int
    samples: int
    p_value: float
    likeliest: float = 1.0

    @property
    def degrees(self) -> int:
        """Degrees of freedom."""
        return self.classes - 1


def chi_square(
    outcomes: Iterable[Outcome],
    law: Mapping[Outcome, float],
    *,
    least_expected: float = LEAST_EXPECTED,
) -> ChiSquare:
    """Test outcomes that were drawn independently.

    Every outcome of `law` (outcome: probability) that is expected `least_expected` times or
    more is a class of its own. All others, those that `law` does not name included, are one
    class; where that is expected less often, it joins the rarest of the others. With one
    class in all there is nothing to test, and the p-value is 1. An outcome that `law` names
    with probability 0 makes it 0.
    """
    counts = Counter(outcomes)
    samples = counts.total()
    expected = {o: p * samples for o, p in law.items() if p * samples >= least_expected}
    observed = [float(counts[outcome]) for outcome in expected]
    means = list(expected.values())
    rest_observed = samples - sum(observed)
    rest_expected = max(samples - sum(means), 0.0)
    if rest_expected >= least_expected or not means:
        observed.append(rest_observed)
        means.append(rest_expected)
    else:
        rarest = means.index(min(means))
        observed[rarest] += rest_observed
        means[rarest] += rest_expected
    if any(law.get(outcome) == 0.0 for outcome in counts):
        return ChiSquare(math.inf, len(means), samples, 0.0, max(means) / samples)
    if len(means) < 2:
        return ChiSquare(0.0, len(means), samples, 1.0)
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, means, strict=True))
    p_value = _tail(statistic, len(means) - 1)
    return ChiSquare(statistic, len(means), samples, p_value, max(means) / samples)


def detectable_shift(result: ChiSquare, *, level: float, power: float = 0.9) -> float:
    """The shift that a test of that size finds with probability `power`, as a share of all.

    It is how much more or less often the likeliest class comes than it should, at the cost or
    in favour of the others in proportion to what they are. `level` is the p-value below which
    the test fails. A shift of d makes the statistic noncentral with
    lambda = samples · d² / (p (1 - p)), p being the class's due (Cohen, "Statistical Power
    Analysis for the Behavioral Sciences", chapter 7).
    """
    if result.classes < 2:
        return math.inf
    critical = _root(lambda x: level - _tail(x, result.degrees))
    noncentrality = _root(lambda x: _noncentral_tail(critical, result.degrees, x) - power)
    spread = result.likeliest * (1 - result.likeliest)
    return math.sqrt(noncentrality * spread / result.samples)


def _root(rising: Callable[[float], float]) -> float:
    """Where a rising function of a positive number crosses 0."""
    high = 1.0
    while rising(high) < 0:
        high *= 2
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return high


def _noncentral_tail(statistic: float, degrees: int, noncentrality: float) -> float:
    """The same for noncentral chi-square: central ones with Poisson weights."""
    half = noncentrality / 2
    terms = torch.arange(int(half + 10 * math.sqrt(half) + 30), dtype=torch.float64)
    weights = (terms * math.log(half) - half - torch.lgamma(terms + 1)).exp()
    tails = torch.special.gammaincc(degrees / 2 + terms, torch.full_like(terms, statistic / 2))
    return float((weights * tails).sum())


def _tail(statistic: float, degrees: int) -> float:
    """The probability that chi-square with `degrees` degrees of freedom is larger."""
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
