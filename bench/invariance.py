"""Seeded tokens do not depend on drafter, draft length, batch or threads."""

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.hostile_drafter import KINDS, HostileCommands
from bench.report import Bar, Report, progress
from bench.requests import Request, random_request
from bench.tiny import write_model, write_noisy
from outrider.client import AsyncClient, Completion, GenerateOptions
from outrider.config import setting
from outrider.exactness.checks import first_difference
from outrider.exactness.margins import margin
from outrider.exactness.reference import Reference, load_reference
from outrider.figures import SpeculationFigures
from outrider.local.commands import NUMERICS, StackSettings
from outrider.local.stack import LocalStack

LETTERS = 48
END_ID = LETTERS
DRAFTERS = ("ngram", "model", *KINDS)
MOST_DRAFT_LEN = 8
# A drafter is waited for. Of an adversarial one some proposals never come.
WAIT_S = {"adversarial": "0.5", "malformed": "0.5"}


@dataclass(frozen=True, slots=True)
class Settings:
    """How many requests, and how each is run."""

    requests: int = setting(200, at_least=1, help="Requests over random parameters.")
    new_tokens: int = setting(24, at_least=2, help="Tokens of each.")
    at_once: int = setting(16, at_least=2, help="Requests at once, besides alone.")
    threads: tuple[int, ...] = setting((1, 2), many=True, help="Threads of the verify worker.")
    drafters: tuple[str, ...] = setting(DRAFTERS, many=True, choices=DRAFTERS, help="Drafters.")
    numerics: str = setting("fast", choices=NUMERICS, help="Numerics of the verify worker.")
    bar: bool = setting(False, help="Exit with 1 when a token differs.")


@dataclass(frozen=True, slots=True)
class Models:
    """The target, a drafter that is often wrong, and the target under transformers."""

    target: Path
    drafter: Path
    reference: Reference


def write_models(where: Path) -> Models:
    """Models that are made for the comparison."""
    target = write_model(where / "target", letters=LETTERS, end=True)
    drafter = write_noisy(target, where / "drafter", noise=0.3)
    return Models(target, drafter, load_reference(str(target)))


def stack_of(models: Models, drafter: str, threads: int, numerics: str = "fast") -> LocalStack:
    """A stack with one of the drafters."""
    wait_s = WAIT_S.get(drafter, "60")
    settings = StackSettings(
        model=str(models.target),
        drafter="model" if drafter == "model" else "ngram",
        draft_model=str(models.drafter) if drafter == "model" else "",
        threads=threads,
        numerics=numerics,
        log_level="warning",
        verify_flags=("--draft-wait-s", wait_s),
    )
    commands = HostileCommands(settings, drafter) if drafter in KINDS else None
    return LocalStack(settings, commands=commands)


async def run_all(
    client: AsyncClient, requests: Sequence[Request], *, at_once: int, first_draft_len: int
) -> list[Completion]:
    """Every request; `first_draft_len` 0 is without speculation, else k goes from there on."""
    gate = asyncio.Semaphore(at_once)

    async def one(number: int, request: Request) -> Completion:
        draft_len = 1 + (number + first_draft_len) % MOST_DRAFT_LEN if first_draft_len else False
        async with gate:
            options: GenerateOptions = {**request.options(), "speculation": draft_len}
            return await client.complete(**options)

    return list(await asyncio.gather(*(one(n, request) for n, request in enumerate(requests))))


class Comparison:
    """Collects the runs that say something else than the first one."""

    def __init__(self, models: Models, requests: Sequence[Request]) -> None:
        self.report = Report(
            "Invariance", ["run", "requests", "equal", "drafted", "acceptance", "margins"]
        )
        self.differing = 0
        self.compared = 0
        self._models = models
        self._requests = requests
        self._expected: list[tuple[int, ...]] = []

    def add(self, name: str, completions: Sequence[Completion], *, drafts: bool) -> None:
        """One run; the first of all is what the others are compared with."""
        said = [completion.token_ids for completion in completions]
        self._expected = self._expected or said
        figures = SpeculationFigures()
        for completion in completions:
            figures.add(completion.speculation)
        margins = []
        for request, ours, expected in zip(self._requests, said, self._expected, strict=True):
            index = first_difference(ours, expected)
            if index is not None:
                before = expected[:index]
                reference, stop_ids = self._models.reference, frozenset({END_ID})
                margins.append(
                    margin(reference, request.prompt, before, request.sampling, stop_ids)
                )
        equal = len(said) - len(margins)
        rate = f"{figures.acceptance_rate:.3f}" if figures.draft_tokens else "-"
        shown = ", ".join(f"{value:.1e}" for value in margins) or "-"
        self.report.rows.append([name, len(said), equal, figures.draft_tokens, rate, shown])
        self.report.figures[name] = {
            "requests": len(said),
            "equal": equal,
            "draft_tokens": figures.draft_tokens,
            "acceptance_rate": figures.acceptance_rate,
            "margins": margins,
        }
        self.compared += len(said)
        self.differing += len(margins)
        if drafts:
            self.report.bars.append(Bar(f"{name}: drafts were verified", figures.draft_tokens > 0))
        progress(f"{name}: {equal} of {len(said)} equal, {figures.draft_tokens} drafted, {rate}")


async def measure(settings: Settings, models: Models) -> Report:
    """Without speculation first, then with each drafter."""
    requests = [
        random_request(number, vocab_size=LETTERS, max_tokens=settings.new_tokens)
        for number in range(settings.requests)
    ]
    comparison = Comparison(models, requests)
    draft_len = 0
    for threads in settings.threads:
        for drafter in settings.drafters:
            stack = stack_of(models, drafter, threads, settings.numerics)
            async with stack, AsyncClient(stack.address) as client:
                for at_once in (1, settings.at_once):
                    where = f"{at_once} at once, {threads} threads"
                    if drafter == settings.drafters[0]:
                        said = await run_all(client, requests, at_once=at_once, first_draft_len=0)
                        comparison.add(f"off, {where}", said, drafts=False)
                    draft_len += 1
                    said = await run_all(
                        client, requests, at_once=at_once, first_draft_len=draft_len
                    )
                    # One that sends rubbish is not asked for long.
                    expected = drafter != "malformed"
                    comparison.add(f"{drafter}, {where}", said, drafts=expected)
    report = comparison.report
    report.figures["compared"] = comparison.compared
    report.figures["differing"] = comparison.differing
    report.bars.insert(
        0,
        Bar(
            "the same tokens in every run",
            not comparison.differing,
            f"{comparison.differing} of {comparison.compared} differ",
        ),
    )
    return report


def run(settings: Settings) -> None:
    """Run seeded requests with every drafter, draft length, batch and thread count."""
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as where:
        report = asyncio.run(measure(settings, write_models(Path(where))))
    report.print()
    report.exit(enforce=settings.bar)
