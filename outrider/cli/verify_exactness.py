"""`outrider verify-exactness`: is what the system says exactly what the target model says?"""

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from outrider.cli.models import resolve_model
from outrider.cli.running import run_interruptible
from outrider.config import CACHE, setting
from outrider.config import command as settings_command
from outrider.exactness.checks import Check
from outrider.exactness.prompts import read_texts
from outrider.exactness.verifier import NGRAM, Plan, check_tokenizers, examine, prepare
from outrider.local.commands import NUMERICS, Commands, StackSettings
from outrider.messages import AcceptanceRule
from outrider.model.embedded import EMBEDDED_MODEL


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The models, and how much to ask of them."""

    target: str = setting(
        EMBEDDED_MODEL, help="The target: a transformers directory, a .gguf file, or this name."
    )
    drafter: str = setting(NGRAM, help="ngram, or a draft model as for --target.")
    prompts: str | None = setting(
        None, help="File with a prompt a line, or JSON lines with prompt or turns."
    )
    count: int = setting(4, at_least=1, help="Prompts of the parity checks.")
    new_tokens: int = setting(24, at_least=2, help="Tokens of each answer.")
    samples: int = setting(500, at_least=200, help="Completions of the distribution test.")
    temperature: float = setting(1.0, at_least=0.01, help="Temperature of what is sampled.")
    top_k: int = setting(
        0, at_least=0, help="Of the distribution test; for a law that is too flat to be tested."
    )
    seed: int = setting(0, at_least=0, at_most=2**63, help="First seed of what is sampled.")
    rule: str = setting(
        "coupled",
        choices=[rule.value for rule in AcceptanceRule],
        help="rejection has a distribution test besides that of the coupled rule.",
    )
    draft_len: int = setting(4, at_least=1, help="Draft length k of each round.")
    tie_margin: float = setting(
        1e-3,
        at_least=0,
        help="Answers that part where the two best scores are closer than this are no failure.",
    )
    threads: int = setting(
        0, at_least=0, help="Threads of each process with a model; 0 shares out the cores."
    )
    numerics: str = setting("fast", choices=NUMERICS, help="Numerics of the verify worker.")
    json: bool = setting(False, help="Print one JSON object instead of the table.")
    cache: str = setting(CACHE, help="Directory for the embedded model.")


class Bar:
    """Shows on stderr how far the verifier is; a line a stage when nobody watches."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._progress = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True))
        self._live = self._progress.console.is_terminal
        self._task = self._progress.add_task("starting", total=1)

    def begin(self, what: str, total: int) -> None:
        """Show what is done now."""
        self._progress.reset(self._task, description=what, total=total)
        if not self._live:
            click.echo(what, err=True)

    def advance(self, steps: int) -> None:
        """Move on."""
        self._progress.advance(self._task, steps)

    def __enter__(self) -> Self:
        if self._live:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()


def run(settings: Settings) -> None:
    """Check that the system says exactly what the target model says, and exit with 1 if not.

    Starts everything on this machine, with your models, and compares: token ids with those of
    plain transformers, seeded answers with and without speculation and in a batch, and the
    law of the first tokens with the target's own by a chi-square test.
    """
    checks: list[Check] = []
    if run_interruptible(lambda: verify(settings, checks)):
        click.echo("interrupted", err=True)
        sys.exit(130)
    if settings.json:
        click.echo(json.dumps(as_json(checks)))
    else:
        Console().print(table_of(checks))
    if not all(check.passed for check in checks):
        sys.exit(1)


async def verify(
    settings: Settings,
    checks: list[Check],
    commands: Callable[[StackSettings], Commands] = Commands,
) -> None:
    """Run every check and add it to `checks`; a wrong tokenizer pair ends them."""
    plan = plan_of(settings)
    with Bar() as bar:
        bar.begin("comparing the tokenizers", 1)
        checks.append(await asyncio.to_thread(check_tokenizers, plan))
        if not checks[0].passed:
            return
        expected = await asyncio.to_thread(prepare, plan, bar)
        await examine(plan, expected, bar, checks.append, commands)
        bar.begin("done", 1)


def plan_of(settings: Settings) -> Plan:
    """The plan that the settings ask for.

    Raises:
        ConfigError: there is no such model, or the prompts can't be read.
    """
    drafter = settings.drafter
    if drafter != NGRAM:
        drafter = resolve_model(drafter, settings.cache)
    rules = [AcceptanceRule.COUPLED]
    if settings.rule == AcceptanceRule.REJECTION.value:
        rules.append(AcceptanceRule.REJECTION)
    return Plan(
        target=resolve_model(settings.target, settings.cache),
        drafter=drafter,
        texts=read_texts(settings.prompts, settings.count),
        new_tokens=settings.new_tokens,
        samples=settings.samples,
        temperature=settings.temperature,
        top_k=settings.top_k,
        seed=settings.seed,
        rules=rules,
        draft_len=settings.draft_len,
        threads=settings.threads,
        numerics=settings.numerics,
        tie_margin=settings.tie_margin,
    )


def table_of(checks: list[Check]) -> Table:
    """The checks for people."""
    table = Table("check", "result", "what was found", title="Exactness")
    for check in checks:
        result = "[green]pass[/]" if check.passed else "[bold red]FAIL[/]"
        table.add_row(check.name, result, check.summary)
    return table


def as_json(checks: list[Check]) -> dict[str, object]:
    """The checks for programs."""
    return {
        "passed": all(check.passed for check in checks),
        "checks": [
            {"name": c.name, "passed": c.passed, "summary": c.summary, "figures": c.figures}
            for c in checks
        ],
    }


command = settings_command(Settings, run, name="verify-exactness")
