"""Speculation over none through all services, prompt by prompt, with transformers beside it."""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.assisted import ASSISTED, LOOKUP, PLAIN, Generation, why_not
from bench.drafters import KINDS, RANDOM, Choice, choose, stack
from bench.kept import Kept
from bench.prompts import encode, load_prompts, prompts_of
from bench.replay import total
from bench.report import Bar, Report, progress
from bench.rounds import Spread, turns
from bench.turns import Compared, Turn, by_category, complete, differences, median_rate
from draft_worker.config import HYBRID, NGRAM, SUFFIX
from outrider.cli.models import AUTO_DRAFTER, resolve_model
from outrider.client import AsyncClient
from outrider.config import CACHE, setting
from outrider.draft_length import AUTO
from outrider.errors import ConfigError
from outrider.model.embedded import EMBEDDED_MODEL
from outrider.model.tokenizers import load_tokenizer

OFF = "off"
ALL = "all"
# The least ratio over all prompts, with a drafter that means well and with a random one.
LEAST, LEAST_RANDOM = 1.5, 0.97
LEAST_CATEGORY = 1.0
_LOOKING_UP = (NGRAM, SUFFIX, HYBRID)
_SHOWN_DIFFERENCES = 20

Side = Callable[[Sequence[int], int], Awaitable[Turn]]


@dataclass(frozen=True, slots=True)
class Settings:
    """What to ask, and of what."""

    model: str = setting(EMBEDDED_MODEL, help="The target: a path, or this name.")
    drafter: str = setting(
        AUTO_DRAFTER,
        choices=(*KINDS, RANDOM),
        help="The drafter; auto as outrider up takes it, random proposes ids by chance.",
    )
    draft_model: str = setting(
        "", help="For --drafter model and hybrid; the embedded model has its own."
    )
    prompts: str | None = setting(None, help="File of JSON lines with category and turns.")
    count: int = setting(240, at_least=1, help="Prompts, taken from the categories in turn.")
    categories: tuple[str, ...] = setting((), many=True, help="Only prompts of these categories.")
    context: int = setting(
        1024, at_least=32, help="Tokens of a prompt and its answer; prompts are cut to fit."
    )
    new_tokens: int = setting(128, at_least=1, help="Most tokens of an answer.")
    temperature: float = setting(0.0, at_least=0, help="Temperature; prompt n has seed n.")
    peers: bool = setting(True, help="Ask transformers too, in the same run.")
    threads: int = setting(
        0, at_least=0, help="Threads of each process that runs a model; 0 shares out the cores."
    )
    least: float | None = setting(
        None, at_least=0, help="Ratio over all prompts to reach: 1.5, or 0.97 with random drafts."
    )
    keep: str = setting(
        "", env=False, help="File for what came of each prompt; a run that was ended goes on there."
    )
    cache: str = setting(CACHE, help="Directory for the embedded model.")
    bar: bool = setting(False, help="Exit with 1 when a bar is not met.")

    def __post_init__(self) -> None:
        choose(self.drafter, self.draft_model, self.model)
        if self.new_tokens >= self.context:
            raise ConfigError("--new-tokens has to leave room for a prompt in --context")

    @property
    def choice(self) -> Choice:
        """What to draft with."""
        return choose(self.drafter, self.draft_model, self.model).resolved(self.cache)


def run(settings: Settings) -> None:
    """Tokens per second of every prompt with the drafter over without, one after the other."""
    path = resolve_model(settings.model, settings.cache)
    tokenizer = load_tokenizer(path)
    prompts = load_prompts(settings.prompts, settings.count, settings.categories)
    longest = settings.context - settings.new_tokens
    ids = [encode(tokenizer, prompt.text, longest) for prompt in prompts]
    # With number -1, to warm up; no other prompt begins like it.
    (warm,) = prompts_of(tokenizer, 1, min(32, longest), first=-1)
    peers = transformers_sides(settings, path)
    ways = [OFF, AUTO, *(peers.ways if peers is not None else ())]
    kept = Kept(Path(settings.keep) if settings.keep else None, about(settings, path, ids, ways))
    if len(kept.rounds) < len(ids):
        asyncio.run(measure(settings, path, [*ids, warm], peers, kept))
    results = {way: [turns[way] for turns in kept.rounds] for way in ways}
    categories = [prompt.category for prompt in prompts]
    report = report_of(results, categories, settings)
    if PLAIN in results:
        beside = peers_report(results, categories, exact=settings.temperature == 0)
        beside.show()
        report.figures["peers"] = beside.figures
    report.print()
    report.exit(enforce=settings.bar)


def transformers_sides(settings: Settings, path: str) -> Generation | None:
    """transformers, as far as it has something like the drafter; None without."""
    if not settings.peers:
        return None
    if reason := why_not(path):
        progress(f"without transformers: {reason}")
        return None
    choice = settings.choice
    assistant = choice.draft_model
    if assistant and (reason := why_not(assistant)):
        progress(f"without assisted generation: {reason}")
        assistant = ""
    return Generation(path, assistant, lookup=choice.drafter in _LOOKING_UP)


def about(
    settings: Settings, path: str, prompts: Sequence[Sequence[int]], ways: Sequence[str]
) -> dict[str, Any]:
    """What a run is of: rounds of another one must not be among its own."""
    choice = settings.choice
    return {
        "target": path,
        "drafter": [choice.drafter, choice.draft_model],
        "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
        "new_tokens": settings.new_tokens,
        "temperature": settings.temperature,
        "threads": settings.threads,
        "ways": list(ways),
    }


async def measure(
    settings: Settings,
    path: str,
    prompts: Sequence[Sequence[int]],
    peers: Generation | None,
    kept: Kept,
) -> None:
    """Every side on every prompt but the last one, which only warms up, as far as not `kept`."""

    def through(client: AsyncClient, speculation: bool | str) -> Side:
        return lambda prompt, seed: complete(
            client,
            prompt,
            speculation=speculation,
            new_tokens=settings.new_tokens,
            temperature=settings.temperature,
            seed=seed,
        )

    def beside(generation: Generation, way: str) -> Side:
        return lambda prompt, seed: asyncio.to_thread(
            generation.complete, way, prompt, settings.new_tokens, settings.temperature, seed
        )

    count = len(prompts) - 1
    async with (
        stack(settings.choice, path, threads=settings.threads) as running,
        AsyncClient(running.address) as client,
    ):
        sides = {OFF: through(client, False), AUTO: through(client, AUTO)}
        if peers is not None:
            sides |= {way: beside(peers, way) for way in peers.ways}
        begun = len(kept.rounds)
        if begun:
            progress(f"{begun} of {count} are there already")
        said: dict[str, Turn] = {}
        for number, name in turns(list(sides), count):
            if 0 <= number < begun:
                continue
            said[name] = await sides[name](prompts[number], max(number, 0))
            if len(said) < len(sides):
                continue
            if number >= 0:
                kept.add(said)
                progress(f"{number + 1} of {count}: {said[AUTO].rate / said[OFF].rate:.2f}x")
            said = {}


def report_of(
    results: Mapping[str, Sequence[Turn]], categories: Sequence[str], settings: Settings
) -> Report:
    """A line a category, with and without the drafter."""
    report = Report(
        f"{settings.choice.name} over no drafts, temperature {settings.temperature:g}",
        ["category", "prompts", "off, tokens/s", "ratio", "in total", "length", "same texts"],
    )
    sides = {OFF: results[OFF], AUTO: results[AUTO]}
    medians: dict[str, float] = {}
    for category, chosen in by_category(categories, sides, ALL).items():
        off, auto = chosen[OFF], chosen[AUTO]
        compared = Compared.of(auto, off)
        figures = total([turn.figures for turn in auto])
        same = len(auto) - len(differences(auto, off))
        medians[category] = compared.over.median
        report.rows.append(
            [
                category,
                len(off),
                Spread.of([turn.rate for turn in off]),
                compared.over,
                compared.in_total,
                figures.mean_acceptance_length,
                f"{same} of {len(off)}",
            ]
        )
        report.figures[category] = {
            "prompts": len(off),
            "tokens_per_s_off": median_rate(off),
            "tokens_per_s_auto": median_rate(auto),
            **asdict(compared),
            "mean_acceptance_length": figures.mean_acceptance_length,
            "draft_tokens_a_round": figures.draft_tokens / max(figures.rounds, 1),
            "same_texts": same,
        }
    different = differences(results[AUTO], results[OFF])
    report.figures["differences"] = different[:_SHOWN_DIFFERENCES]
    report.bars = bars(medians, settings)
    report.bars.append(
        Bar("every text is the same without drafts", not different, f"{len(different)} differ")
    )
    return report


def bars(medians: Mapping[str, float], settings: Settings) -> list[Bar]:
    """On the median ratio of all prompts, and of each category unless drafts are random."""
    hostile = settings.drafter == RANDOM
    least = settings.least
    if least is None:
        least = LEAST_RANDOM if hostile else LEAST
    found = [Bar(f"at least {least:g}x over all", medians[ALL] >= least, f"{medians[ALL]:.3f}x")]
    if not hostile:
        slow = [
            f"{name} {of:.3f}x"
            for name, of in medians.items()
            if name != ALL and of < LEAST_CATEGORY
        ]
        found.append(Bar(f"no category below {LEAST_CATEGORY:g}x", not slow, ", ".join(slow)))
    return found


def peers_report(
    results: Mapping[str, Sequence[Turn]], categories: Sequence[str], *, exact: bool
) -> Report:
    """A line a category: each side over plain transformers; texts are compared if `exact`."""
    others = [name for name in (OFF, AUTO, ASSISTED, LOOKUP) if name in results]
    report = Report(
        "Over plain generate of transformers",
        ["category", "transformers, tokens/s", *others, *(["same texts"] if exact else [])],
    )
    for category, chosen in by_category(categories, results, ALL).items():
        plain = chosen[PLAIN]
        compared = {name: Compared.of(chosen[name], plain) for name in others}
        row: list[object] = [category, Spread.of([turn.rate for turn in plain])]
        row += [of.over for of in compared.values()]
        report.figures[category] = {
            "tokens_per_s": median_rate(plain),
            **{name: asdict(of) for name, of in compared.items()},
        }
        if exact:
            # Near ties may differ without a fault.
            same = len(plain) - len(differences(chosen[OFF], plain))
            row.append(f"{same} of {len(plain)}")
            report.figures[category]["same_texts"] = same
        report.rows.append(row)
    return report
