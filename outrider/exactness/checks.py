"""What a check found: whether it holds, in words, and in figures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.exactness.law import Law
from outrider.exactness.outcomes import Drawn
from outrider.exactness.statistics import chi_square, detectable_shift
from outrider.figures import SpeculationFigures

Ids = Sequence[tuple[int, ...]]
# How far apart the two best tokens were, given which answer differs and the index of its
# first token that does.
MarginAt = Callable[[int, int], float]


@dataclass(frozen=True, slots=True)
class Check:
    """One check; `figures` can be written as JSON."""

    name: str
    passed: bool
    summary: str
    figures: dict[str, Any] = field(default_factory=dict)


def parity(name: str, said: Ids, expected: Ids, margin_at: MarginAt, tie_margin: float) -> Check:
    """Whether every answer has exactly the expected token ids.

    Where two tokens are nearly tied, sums in another order may choose the other one without
    any fault: an answer that first differs where the margin is below `tie_margin` is counted
    as a tie, and is not a failure.
    """
    first = [first_difference(ours, theirs) for ours, theirs in zip(said, expected, strict=True)]
    differing = [
        (number, index, margin_at(number, index))
        for number, index in enumerate(first)
        if index is not None
    ]
    faults = [found for found in differing if not found[2] < tie_margin]
    ties = len(differing) - len(faults)
    tokens = sum(len(ids) for ids in expected)
    summary = f"{len(said) - len(differing)} of {len(said)} answers equal ({tokens} tokens)"
    if ties:
        summary += f", {ties} differ from a near tie on (margin below {tie_margin:g})"
    figures: dict[str, Any] = {
        "answers": len(said),
        "tokens": tokens,
        "mismatches": len(faults),
        "ties": ties,
        "first": None,
    }
    if differing:
        number, index, margin = (faults or differing)[0]
        ours, theirs = said[number][index:][:1], expected[number][index:][:1]
        summary += (
            f"; answer {number + 1} differs first at token {index}: {_shown(ours)} instead of "
            f"{_shown(theirs)}, where the best two are {margin:.2g} apart"
        )
        figures["first"] = {"answer": number, "index": index, "margin": margin}
    return Check(name, not faults, summary, figures)


def distribution(name: str, drawn: Drawn, law: Law, least_p_value: float) -> Check:
    """Whether drawn outcomes follow the law, by Pearson's chi-square test."""
    result = chi_square(drawn.outcomes, law)
    shift = detectable_shift(result, level=least_p_value)
    figures = drawn.figures
    summary = (
        f"p-value {result.p_value:.3g} (chi-square {result.statistic:.1f}, {result.classes} "
        f"classes, {result.samples} samples; {figures.draft_tokens} drafted tokens verified); "
        f"finds a shift of {shift:.1%} of the outcomes 9 times in 10"
    )
    if result.classes < 2:
        summary = (
            f"nothing was tested: in {result.samples} samples no outcome is expected often "
            "enough; ask for more samples, a lower temperature or a top-k"
        )
    return Check(
        name,
        result.classes > 1 and result.p_value > least_p_value,
        summary,
        {
            "p_value": result.p_value,
            "chi_square": result.statistic,
            "classes": result.classes,
            "samples": result.samples,
            "detectable_shift": shift if result.classes > 1 else None,
            "draft_tokens": figures.draft_tokens,
            "acceptance_rate": figures.acceptance_rate,
        },
    )


def acceptance(figures: SpeculationFigures) -> Check:
    """What speculation did in all the other checks; without drafts they say nothing of it."""
    summary = "no draft was verified, so nothing above says anything about speculation"
    if figures.draft_tokens:
        summary = (
            f"{figures.accepted_tokens} of {figures.draft_tokens} drafted tokens accepted "
            f"({figures.acceptance_rate:.1%}), mean acceptance length "
            f"{figures.mean_acceptance_length:.2f}"
        )
    return Check(
        "acceptance",
        figures.draft_tokens > 0,
        summary,
        {
            "rounds": figures.rounds,
            "drafts": figures.drafts,
            "draft_tokens": figures.draft_tokens,
            "accepted_tokens": figures.accepted_tokens,
            "acceptance_rate": figures.acceptance_rate,
            "mean_acceptance_length": figures.mean_acceptance_length,
        },
    )


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first index where two sequences differ; None when they are equal."""
    for index, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def _shown(token: tuple[int, ...]) -> str:
    return str(token[0]) if token else "the end"
