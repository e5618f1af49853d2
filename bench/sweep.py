"""Tokens per second with 1 to 32 sessions at once: no drafts, fixed lengths, the chosen length."""

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.drafters import KINDS, Choice, choose, stack
from bench.prompts import encode, load_prompts, prompts_of
from bench.report import Bar, Report, progress
from bench.rounds import Spread, ratios, turns
from bench.turns import Turn, differences
from outrider.cli.models import AUTO_DRAFTER, resolve_model
from outrider.client import AsyncClient
from outrider.config import CACHE, setting
from outrider.draft_length import AUTO
from outrider.errors import ConfigError
from outrider.model.embedded import EMBEDDED_MODEL
from outrider.model.tokenizers import load_tokenizer

OFF = "off"
# What the chosen length must reach of the best of the others, at every number of sessions.
LEAST = 0.97
_WARM_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Settings:
    """What to ask, how many at once, and of what."""

    model: str = setting(EMBEDDED_MODEL, help="The target: a path, or this name.")
    drafter: str = setting(
        AUTO_DRAFTER, choices=KINDS, help="The drafter; auto as outrider up takes it."
    )
    draft_model: str = setting(
        "", help="For --drafter model and hybrid; the embedded model has its own."
    )
    prompts: str | None = setting(None, help="File of JSON lines with category and turns.")
    sessions: tuple[int, ...] = setting(
        (1, 2, 4, 8, 16, 32), many=True, at_least=1, help="Sessions at once."
    )
    lengths: tuple[int, ...] = setting(
        (2, 4, 8), many=True, at_least=1, help="Fixed draft lengths to compare with."
    )
    rounds: int = setting(5, at_least=1, help="Rounds; every way has its turn in each.")
    in_turn: int = setting(3, at_least=2, help="Prompts of a session in a turn, one by one.")
    prompt_tokens: int = setting(256, at_least=16, help="Longest prompt, in tokens.")
    new_tokens: int = setting(64, at_least=1, help="Most tokens of an answer.")
    threads: int = setting(
        0, at_least=0, help="Threads of each process that runs a model; 0 shares out the cores."
    )
    plot: str = setting("", env=False, help="File for a plot, such as sweep.png.")
    cache: str = setting(CACHE, help="Directory for the embedded model.")
    bar: bool = setting(False, help="Exit with 1 when a bar is not met.")

    def __post_init__(self) -> None:
        choose(self.drafter, self.draft_model, self.model)
        if self.plot and not Path(self.plot).absolute().parent.is_dir():
            raise ConfigError(f"--plot {self.plot}: there is no such directory")

    @property
    def choice(self) -> Choice:
        """What to draft with."""
        return choose(self.drafter, self.draft_model, self.model).resolved(self.cache)


@dataclass(slots=True)
class Point:
    """What each way did at one number of sessions: tokens per second by round, and texts."""

    sessions: int
    rates: dict[str, list[float]] = field(default_factory=dict)
    said: dict[str, list[Turn]] = field(default_factory=dict)

    @property
    def best(self) -> str:
        """The way with the highest median, but for the chosen length."""
        others = [way for way in self.rates if way != AUTO]
        return max(others, key=lambda way: Spread.of(self.rates[way]).median)

    @property
    def over_best(self) -> Spread:
        """The chosen length over the best of the others, by round."""
        return ratios(self.rates[AUTO], self.rates[self.best])

    @property
    def different(self) -> dict[str, list[dict[str, Any]]]:
        """By way, the texts that are not those without drafts."""
        found = {way: differences(said, self.said[OFF]) for way, said in self.said.items()}
        return {way: texts for way, texts in found.items() if texts}


def run(settings: Settings) -> None:
    """Several sessions at once through all services, by how far is drafted."""
    path = resolve_model(settings.model, settings.cache)
    tokenizer = load_tokenizer(path)
    most = max(settings.sessions) * settings.in_turn
    texts = load_prompts(settings.prompts, most * settings.rounds)
    prompts = [encode(tokenizer, text.text, settings.prompt_tokens) for text in texts]
    if len(prompts) < most:
        # Two sessions of one prompt would help each other.
        progress(f"{len(prompts)} prompts where a turn has {most}: taking made-up ones")
        prompts = prompts_of(tokenizer, most, settings.prompt_tokens)
    warm = prompts_of(tokenizer, most, min(_WARM_TOKENS, settings.prompt_tokens), first=-most)
    points = asyncio.run(measure(settings, path, prompts, warm))
    report = report_of(points, settings.choice.name)
    if settings.plot:
        draw(Path(settings.plot), points, report.title)
    report.print()
    report.exit(enforce=settings.bar)


def ways(lengths: Sequence[int]) -> dict[str, bool | int | str]:
    """What to compare, by name."""
    fixed: dict[str, bool | int | str] = {f"k = {k}": k for k in lengths}
    return {OFF: False, **fixed, AUTO: AUTO}


async def measure(
    settings: Settings, path: str, prompts: Sequence[list[int]], warm: Sequence[list[int]]
) -> list[Point]:
    """Every way at every number of sessions, in turns; a round's prompts are the same for all."""
    points = []
    compared = ways(settings.lengths)
    async with stack(settings.choice, path, threads=settings.threads) as running:
        for sessions in dict.fromkeys(settings.sessions):
            point = Point(sessions, {way: [] for way in compared}, {way: [] for way in compared})
            for number, way in turns(list(compared), settings.rounds):
                chosen = warm[:sessions]
                if number >= 0:
                    chosen = of_round(prompts, sessions * settings.in_turn, number)
                # As a tenant of its own: nothing is drafted from what another way said.
                tenant = f"{sessions}.{number}.{compared[way]}"
                async with AsyncClient(running.address, tenant=tenant) as client:
                    rate, said = await together(
                        client, chosen, sessions, compared[way], settings.new_tokens
                    )
                if number >= 0:
                    point.rates[way].append(rate)
                    point.said[way] += said
                    progress(f"{sessions} sessions, round {number + 1}, {way}: {rate:.1f} tokens/s")
            points.append(point)
    return points


def of_round(prompts: Sequence[list[int]], count: int, number: int) -> list[list[int]]:
    """The prompts of a round, no one twice; rounds take others as far as there are enough."""
    first = number * count
    return [prompts[(first + n) % len(prompts)] for n in range(count)]


async def together(
    client: AsyncClient,
    prompts: Sequence[list[int]],
    sessions: int,
    speculation: bool | int | str,
    new_tokens: int,
) -> tuple[float, list[Turn]]:
    """So many at once, a new one whenever one ends: tokens per second, and what each said.

    Tokens count as long as all sessions are busy: until one ends and no prompt is left. The
    first answers are cut to lengths that differ, so that sessions are at different places of
    their answers then, however fast each is: a prompt is paid for before its answer comes.
    """
    await client.status()  # connects
    waiting = list(enumerate(prompts))[::-1]
    said: dict[int, Turn] = {}
    tokens, idle_at_s = 0, math.inf

    async def one_after_another() -> None:
        nonlocal tokens, idle_at_s
        while waiting:
            number, prompt = waiting.pop()
            asked_s = time.perf_counter()
            share = min((number + 1) / sessions, 1.0)
            stream = client.generate(
                token_ids=prompt,
                max_tokens=math.ceil(share * new_tokens),
                temperature=0.0,
                speculation=speculation,
            )
            async for chunk in stream:
                if time.perf_counter() < idle_at_s:
                    tokens += len(chunk.token_ids)
            completion = await stream.complete()
            seconds = time.perf_counter() - asked_s
            said[number] = Turn(completion.token_ids, seconds, completion.speculation)
        idle_at_s = min(idle_at_s, time.perf_counter())

    began_s = time.perf_counter()
    await asyncio.gather(*(one_after_another() for _ in range(sessions)))
    return tokens / (idle_at_s - began_s), [said[number] for number in sorted(said)]


def report_of(points: Sequence[Point], name: str) -> Report:
    """A line for each number of sessions, and a bar."""
    compared = list(points[0].rates)
    report = Report(
        f"Tokens per second by draft length, {name}",
        ["sessions", *compared, "best of the others", f"{AUTO} over it", "other texts"],
    )
    for point in points:
        spreads = {way: Spread.of(rates) for way, rates in point.rates.items()}
        over, different = point.over_best, point.different
        count = sum(map(len, different.values()))
        report.rows.append([point.sessions, *spreads.values(), point.best, over, count])
        report.figures[str(point.sessions)] = {
            "tokens_per_s": {way: asdict(spread) for way, spread in spreads.items()},
            "best": point.best,
            "auto_over_best": asdict(over),
            "differences": different,
        }
        title = f"{point.sessions} sessions: {AUTO} at least {LEAST:g}x the best of the others"
        report.bars.append(Bar(title, over.median >= LEAST, f"{over}x of {point.best}"))
    differ = sum(len(texts) for point in points for texts in point.different.values())
    title = "every text is the same without drafts"
    report.bars.append(Bar(title, not differ, f"{differ} differ"))
    return report


def draw(where: Path, points: Sequence[Point], title: str) -> None:
    """A line for each way: median tokens per second by sessions, quartiles as a band."""
    # Not at the top: nothing else needs it.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    sessions = [point.sessions for point in points]
    for way, style in styles(points[0].rates).items():
        spreads = [Spread.of(point.rates[way]) for point in points]
        (line,) = axes.plot(sessions, [spread.median for spread in spreads], label=way, **style)
        axes.fill_between(
            sessions,
            [spread.low for spread in spreads],
            [spread.high for spread in spreads],
            color=line.get_color(),
            alpha=0.15,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(sessions, [str(count) for count in sessions])
    axes.set_ylim(bottom=0)
    axes.set(xlabel="sessions at once", ylabel="tokens/s, all together", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(where, dpi=110)


def styles(compared: Mapping[str, object]) -> dict[str, dict[str, Any]]:
    """How a line looks: the chosen length stands out, no drafts are black."""
    found: dict[str, dict[str, Any]] = {way: {"linestyle": "--"} for way in compared}
    found[OFF] |= {"color": "black"}
    found[AUTO] = {"linestyle": "-", "color": "crimson", "linewidth": 2.5, "marker": "o"}
    return found
