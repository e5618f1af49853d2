"""The chi-square test against scipy's, and what it does with rare and impossible outcomes."""

import math
import random
from collections import Counter

import pytest
from scipy import stats

from outrider.exactness.statistics import ChiSquare, chi_square, detectable_shift

LAW = {"a": 0.5, "b": 0.3, "c": 0.15, "d": 0.05}


def drawn(samples: int, law: dict[str, float] = LAW, seed: int = 1) -> list[str]:
    return random.Random(seed).choices(list(law), list(law.values()), k=samples)


def test_statistic_and_p_value_are_those_of_scipy() -> None:
    outcomes = drawn(1000)
    counts = Counter(outcomes)
    expected = stats.chisquare([counts[o] for o in LAW], [p * 1000 for p in LAW.values()])
    result = chi_square(outcomes, LAW)
    assert result.statistic == pytest.approx(expected.statistic)
    assert result.p_value == pytest.approx(expected.pvalue)
    assert (result.classes, result.degrees, result.samples) == (4, 3, 1000)


def test_p_values_of_the_right_law_are_uniform_and_of_a_wrong_one_small() -> None:
    right = [chi_square(drawn(500, seed=seed), LAW).p_value for seed in range(300)]
    assert stats.kstest(right, "uniform").pvalue > 0.001
    wrong = {"a": 0.4, "b": 0.4, "c": 0.15, "d": 0.05}
    assert chi_square(drawn(1000), wrong).p_value < 1e-6


def test_rare_outcomes_are_one_class() -> None:
    law = {"a": 0.9, **{f"rare {n}": 0.01 for n in range(10)}}
    outcomes = ["a"] * 90 + ["rare 1"] * 10
    result = chi_square(outcomes, law)
    assert result.classes == 2
    assert result.statistic == pytest.approx(0.0)
    # Those that the law does not name are of that class too.
    assert chi_square(["a"] * 90 + ["?"] * 10, {"a": 0.9}).statistic == pytest.approx(0.0)
    assert chi_square(["a"] * 50 + ["?"] * 50, {"a": 0.9}).p_value < 1e-6


def test_a_small_rest_joins_the_rarest_class() -> None:
    law = {"a": 0.5, "b": 0.48, "c": 0.02}
    result = chi_square(["a"] * 50 + ["b"] * 47 + ["c"] * 3, law)
    assert result.classes == 2
    assert result.statistic == pytest.approx(0.0)


def test_one_class_says_nothing_and_an_impossible_outcome_everything() -> None:
    assert chi_square(["a"] * 9, {"a": 1.0}).p_value == 1.0
    assert chi_square([], LAW).p_value == 1.0
    impossible = chi_square(["a"] * 999 + ["z"], {"a": 1.0, "z": 0.0})
    assert impossible.p_value == 0.0
    assert math.isinf(impossible.statistic)


@pytest.mark.parametrize("classes", [2, 4, 18, 150])
@pytest.mark.parametrize("samples", [200, 1000, 50_000])
def test_the_shift_that_is_found_is_that_of_the_noncentral_law(classes: int, samples: int) -> None:
    result = ChiSquare(0.0, classes, samples, 1.0, likeliest=0.3)
    shift = detectable_shift(result, level=0.001)
    noncentrality = samples * shift**2 / (0.3 * 0.7)
    critical = stats.chi2.isf(0.001, classes - 1)
    assert stats.ncx2.sf(critical, classes - 1, noncentrality) == pytest.approx(0.9, abs=1e-6)
    assert detectable_shift(ChiSquare(0.0, 1, samples, 1.0), level=0.001) == math.inf


@pytest.mark.parametrize("sign", [1, -1])
def test_a_shift_of_that_size_is_found_9_times_in_10(sign: int) -> None:
    shift = detectable_shift(chi_square(drawn(1000), LAW), level=0.001)
    moved = {"a": 0.5 + sign * shift}
    moved |= {o: p * (0.5 - sign * shift) / 0.5 for o, p in LAW.items() if o != "a"}
    found = [chi_square(drawn(1000, moved, seed), LAW).p_value < 0.001 for seed in range(500)]
    assert sum(found) == pytest.approx(450, abs=25)
    # And in vain when nothing is wrong.
    right = [chi_square(drawn(1000, LAW, seed), LAW).p_value < 0.001 for seed in range(500)]
    assert sum(right) <= 4
