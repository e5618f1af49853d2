"""Tokens per second with speculation over without: the same prompts in turn, one stack."""

import asyncio
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass

from bench.prompts import Prompt, load_prompts
from bench.report import Bar, Report, progress
from outrider.cli.models import resolve_model
from outrider.client import AsyncClient, Completion
from outrider.config import CACHE, setting
from outrider.draft_length import AUTO
from outrider.figures import SpeculationFigures
from outrider.local.commands import DRAFTERS, StackSettings
from outrider.local.stack import LocalStack
from outrider.model.embedded import EMBEDDED_MODEL


@dataclass(frozen=True, slots=True)
class Settings:
    """What to time."""

    model: str = setting(EMBEDDED_MODEL, help="The target: a path, or this name.")
    drafter: str = setting("ngram", choices=DRAFTERS, help="The drafter.")
    draft_model: str = setting("", help="For --drafter model and hybrid.")
    prompts: str | None = setting(None, help="File of JSON lines with category and turns.")
    count: int = setting(10, at_least=1, help="Prompts.")
    new_tokens: int = setting(96, at_least=1, help="Tokens to generate.")
    k: str = setting(AUTO, help="Draft length of each round: auto or fixed:N.")
    cache: str = setting(CACHE, help="Directory for the embedded model.")
    bar: bool = setting(False, help="Exit with 1 when a text differs.")


async def timed(
    client: AsyncClient, prompt: Prompt, settings: Settings, speculation: bool
) -> tuple[Completion, float]:
    """One completion and its tokens per second, as the client sees them."""
    started = time.perf_counter()
    completion = await client.complete(
        messages=[{"role": "user", "content": prompt.text}],
        max_tokens=settings.new_tokens,
        temperature=0.0,
        speculation=speculation,
    )
    return completion, len(completion.pieces) / (time.perf_counter() - started)


async def measure(settings: Settings, model: str, prompts: list[Prompt]) -> Report:
    """Each prompt without and with speculation, one right after the other."""
    stack_settings = StackSettings(
        model=model,
        drafter=settings.drafter,
        draft_model=settings.draft_model,
        k=settings.k,
    )
    ratios: dict[str, list[float]] = defaultdict(list)
    rates: dict[bool, list[float]] = defaultdict(list)
    figures: dict[str, SpeculationFigures] = defaultdict(SpeculationFigures)
    equal = 0
    async with (
        LocalStack(stack_settings, report=progress) as stack,
        AsyncClient(stack.address) as client,
    ):
        await timed(client, prompts[0], settings, False)  # the first call is slower
        for number, prompt in enumerate(prompts):
            # Alternate who goes first, so that neither has the warmer machine.
            results = {}
            for speculate in (False, True) if number % 2 else (True, False):
                results[speculate] = await timed(client, prompt, settings, speculate)
                rates[speculate].append(results[speculate][1])
            off, on = results[False], results[True]
            equal += off[0].token_ids == on[0].token_ids
            ratios[prompt.category].append(on[1] / off[1])
            figures[prompt.category].add(on[0].speculation)
            progress(f"{number + 1} of {len(prompts)}: {on[1] / off[1]:.2f}x")
    report = Report("Speculation over none", ["category", "prompts", "ratio", "acceptance length"])
    for category, values in ratios.items():
        length = figures[category].mean_acceptance_length
        report.rows.append([category, len(values), statistics.median(values), length])
    every = [ratio for values in ratios.values() for ratio in values]
    report.rows.append(["all", len(every), statistics.median(every), ""])
    report.figures = {
        "median_ratio": statistics.median(every),
        "ratio_by_category": {c: statistics.median(v) for c, v in ratios.items()},
        "tokens_per_s_off": statistics.median(rates[False]),
        "tokens_per_s_on": statistics.median(rates[True]),
        "equal": equal,
        "prompts": len(prompts),
    }
    report.bars = [Bar("every text is the same with speculation", equal == len(prompts))]
    return report


def run(settings: Settings) -> None:
    """Time the same prompts without and with speculation."""
    model = resolve_model(settings.model, settings.cache)
    prompts = load_prompts(settings.prompts, settings.count)
    report = asyncio.run(measure(settings, model, prompts))
    report.print()
    report.exit(enforce=settings.bar)
