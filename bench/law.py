"""The law of the first three tokens, through real services, against the target's own."""

import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.report import Bar, Report, progress
from bench.tiny import write_model, write_noisy
from bench.wrong_worker import WrongCommands
from outrider.client import AsyncClient, GenerateOptions
from outrider.config import setting
from outrider.draft_length import format_draft_length
from outrider.exactness.law import Law, law_of, tempered
from outrider.exactness.outcomes import Drawn, draw_outcomes
from outrider.exactness.reference import load_reference
from outrider.exactness.statistics import ChiSquare, chi_square
from outrider.local.commands import StackSettings
from outrider.local.stack import LocalStack

LETTERS = 12
PROMPT = (0, 1, 2, 3)
# Of the right rules; a wrong one must stay below.
LEAST_P_VALUE = 0.001
# The faults that the chi-square test has to find.
WRONG_RULES = ("softmax-residual", "untruncated-q")


@dataclass(frozen=True, slots=True)
class Settings:
    """How many outcomes, and how wrong the drafter is."""

    samples: int = setting(50_000, at_least=1000, help="Outcomes of each right rule.")
    wrong_samples: int = setting(10_000, at_least=500, help="Outcomes of each wrong rule.")
    tokens: int = setting(3, at_least=2, at_most=4, help="Tokens of an outcome.")
    temperature: float = setting(0.7, at_least=0.05, help="Temperature.")
    noise: float = setting(0.5, at_least=0, help="Noise on the drafter's weights.")
    q_top: int = setting(6, at_least=0, help="Tokens that the drafter's q has; 0 is all.")
    at_once: int = setting(96, at_least=1, help="Sessions at once.")
    bar: bool = setting(False, help="Exit with 1 when a p-value is on the wrong side.")


@dataclass(frozen=True, slots=True)
class Run:
    """One rule, right or with a fault."""

    name: str
    rule: str
    fault: str = ""


RUNS = (
    Run("coupled", "coupled"),
    Run("rejection", "rejection"),
    *(Run(f"rejection, {fault}", "rejection", fault) for fault in WRONG_RULES),
)


def stack_settings(target: Path, drafter: Path, settings: Settings) -> StackSettings:
    """A stack that waits for its drafter and trusts what it says of itself."""
    return StackSettings(
        model=str(target),
        drafter="model",
        draft_model=str(drafter),
        k=format_draft_length(settings.tokens - 1),
        threads=1,
        log_level="warning",
        trust_drafts=True,
        verify_flags=(
            *("--draft-wait-s", "60"),
            *("--q-top", str(settings.q_top)),
            *("--max-sessions", str(settings.at_once)),
            *("--step-tokens", str(8 * settings.at_once)),
        ),
    )


async def draw(
    stack: StackSettings, run: Run, settings: Settings, samples: int
) -> tuple[Drawn, float]:
    """The outcomes of one rule through a stack of its own, and the seconds that they took."""
    commands = WrongCommands(stack, run.fault) if run.fault else None
    options = GenerateOptions(
        token_ids=PROMPT, temperature=settings.temperature, rule=run.rule, speculation=True
    )
    local_stack = LocalStack(stack, commands=commands)
    async with local_stack, AsyncClient(local_stack.address) as client:
        started = time.perf_counter()
        drawn = await draw_outcomes(
            client,
            options,
            samples=samples,
            tokens=settings.tokens,
            at_once=settings.at_once,
        )
        return drawn, time.perf_counter() - started


async def measure(settings: Settings, where: Path) -> Report:
    """Every rule, one after the other."""
    target = write_model(where / "target", letters=LETTERS, scale=5.0)
    drafter = write_noisy(target, where / "drafter", noise=settings.noise)
    law = law_of(
        load_reference(str(target)), PROMPT, settings.tokens, tempered(settings.temperature)
    )
    report = Report(
        "Law of the first tokens",
        ["rule", "outcomes", "classes", "chi-square", "p-value", "acceptance", "outcomes/s"],
    )
    for run in RUNS:
        samples = settings.wrong_samples if run.fault else settings.samples
        drawn, seconds = await draw(
            stack_settings(target, drafter, settings), run, settings, samples
        )
        add(report, run, drawn, chi_square(drawn.outcomes, law), law, seconds)
    return report


def add(
    report: Report, run: Run, drawn: Drawn, result: ChiSquare, law: Law, seconds: float
) -> None:
    """One row, its figures and its bars."""
    rate = drawn.figures.acceptance_rate
    report.rows.append(
        [
            run.name,
            result.samples,
            result.classes,
            f"{result.statistic:.1f}",
            result.p_value,
            f"{rate:.3f}",
            f"{result.samples / seconds:.0f}",
        ]
    )
    report.figures[run.name] = {
        "samples": result.samples,
        "outcomes": len(law),
        "classes": result.classes,
        "chi_square": result.statistic,
        "p_value": result.p_value,
        "acceptance_rate": rate,
        "draft_tokens": drawn.figures.draft_tokens,
        "samples_per_s": result.samples / seconds,
    }
    if run.fault:
        found = result.p_value < LEAST_P_VALUE
        report.bars.append(
            Bar(f"{run.name}: found to be wrong", found, f"p = {result.p_value:.2g}")
        )
    else:
        right = result.p_value > LEAST_P_VALUE
        report.bars.append(Bar(f"{run.name}: the target's law", right, f"p = {result.p_value:.3g}"))
        drafted = drawn.figures.draft_tokens >= result.samples
        report.bars.append(
            Bar(f"{run.name}: drafts were verified", drafted and rate < 0.95, f"{rate:.3f}")
        )
    progress(f"{run.name}: p = {result.p_value:.3g}, {result.samples / seconds:.0f} outcomes/s")


def run(settings: Settings) -> None:
    """Draw outcomes through real services and test their law, right rules and wrong ones."""
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as where:
        report = asyncio.run(measure(settings, Path(where)))
    report.print()
    report.exit(enforce=settings.bar)
