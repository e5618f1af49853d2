"""Tokens per second of several sides on the same prompts, in turns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.report import Bar, Report, progress
from bench.rounds import Spread, alternate, ratios
from bench.sides import Completed, Side

COLUMNS = ("side", "tokens/s", "first, ms", "next, ms", "ratio", "same texts")

# The prompts of a round by its number, all of one length; no two rounds begin alike.
Prompts = Callable[[int], list[list[int]]]
# Rounds of calls for one token alone have prompts of their own: a cache must not help the other.
_FIRST_TOKEN = 50_000


@dataclass(slots=True)
class Throughput:
    """What one side did in each round, for `sessions` prompts together.

    `rates` are tokens per second of a whole call, prompts included, `first_s` seconds of a call
    for one token each, `step_s` seconds of each further token of every prompt.
    """

    rates: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    said: list[list[list[int]]] = field(default_factory=list)

    def add(self, first: Completed, whole: Completed) -> None:
        """One round: a call for one token each, and a whole one."""
        tokens = len(whole.token_ids[0])
        self.rates.append(sum(map(len, whole.token_ids)) / whole.seconds)
        self.first_s.append(first.seconds)
        self.step_s.append((whole.seconds - first.seconds) / max(tokens - 1, 1))
        self.said.append(whole.token_ids)


def measure(
    sides: Sequence[Side], prompts: Prompts, *, new_tokens: int, rounds: int
) -> dict[str, Throughput]:
    """Every side on the prompts of every round; a first round only warms up."""

    def turn(side: Side) -> Callable[[int], tuple[Completed, Completed]]:
        def one(number: int) -> tuple[Completed, Completed]:
            first = side.complete(prompts(_FIRST_TOKEN + number), 1)
            whole = side.complete(prompts(number), new_tokens)
            progress(f"round {number + 1} of {rounds}: {side.name} {whole.seconds:.2f} s")
            return first, whole

        return one

    results = {side.name: Throughput() for side in sides}
    for name, calls in alternate({side.name: turn(side) for side in sides}, rounds).items():
        for first, whole in calls:
            results[name].add(first, whole)
    return results


def report_of(
    title: str, results: Mapping[str, Throughput], ours: str, least: Mapping[str, float]
) -> Report:
    """The table, with a bar for each side in `least`: the least ratio of `ours` over it."""
    report = Report(title, COLUMNS)
    mine = results[ours]
    for name, result in results.items():
        over = ratios(mine.rates, result.rates)
        spreads = {
            "tokens_per_s": Spread.of(result.rates),
            "first_token_s": Spread.of(result.first_s),
            "further_token_s": Spread.of(result.step_s),
            "outrider_over_it": over,
        }
        same, texts = _same(mine, result)
        report.rows.append(
            [
                name,
                spreads["tokens_per_s"],
                spreads["first_token_s"].times(1e3),
                spreads["further_token_s"].times(1e3),
                "" if name == ours else over,
                "" if name == ours else f"{same} of {texts}",
            ]
        )
        figures: dict[str, Any] = {key: asdict(spread) for key, spread in spreads.items()}
        report.figures[name] = {**figures, "same_texts": same, "texts": texts}
    for name, bar in least.items():
        title = f"at least {bar:g}x the tokens per second of {name}"
        if name not in results:
            report.bars.append(Bar(title, False, "not measured"))
            continue
        ratio = ratios(mine.rates, results[name].rates)
        report.bars.append(Bar(title, ratio.median >= bar, f"{ratio}x"))
    return report


def _same(mine: Throughput, other: Throughput) -> tuple[int, int]:
    """How many texts are the same, of how many; near ties may differ without a fault."""
    pairs = [
        (left, right)
        for of_mine, of_other in zip(mine.said, other.said, strict=True)
        for left, right in zip(of_mine, of_other, strict=True)
    ]
    return sum(left == right for left, right in pairs), len(pairs)
