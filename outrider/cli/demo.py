"""`outrider demo`: the same text twice, without and with speculation."""

import sys
from dataclasses import dataclass

import click
from rich import box
from rich.console import Console
from rich.table import Table

from outrider.cli import INTERRUPTED
from outrider.cli.display import legend, write_chunk
from outrider.cli.models import AUTO_DRAFTER, choose_drafter, resolve_model
from outrider.cli.running import check_before_start, run_interruptible
from outrider.client import AsyncClient, Completion
from outrider.config import CACHE, setting
from outrider.config import command as settings_command
from outrider.draft_length import AUTO, parse_draft_length
from outrider.errors import InternalError
from outrider.local.commands import StackSettings
from outrider.local.stack import LocalStack
from outrider.model.embedded import EMBEDDED_MODEL

# Much of the answer stands in the prompt already: the kind of text that lookup drafts well.
PROMPT = """\
Repeat the following text word for word.

The old lighthouse stood at the end of the long stone pier. Every evening the keeper climbed \
the narrow stairs, lit the great lamp, and watched the fishing boats come home. When the fog \
was thick, he rang the heavy bell until the last boat was safe in the harbour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to show."""

    model: str = setting(EMBEDDED_MODEL, help="The target: a path, or this name.")
    max_tokens: int = setting(96, at_least=1, help="Tokens to generate, twice.")
    k: str = setting(AUTO, help="Draft length of each round: auto or fixed:N.")
    threads: int = setting(0, at_least=0, help="Threads of the verify worker; 0 takes all cores.")
    color: bool = setting(True, help="Show in colour where each token came from.")
    cache: str = setting(CACHE, help="Directory for the embedded model.")

    def __post_init__(self) -> None:
        parse_draft_length(self.k)


def run(settings: Settings) -> None:
    """Start everything, stream one answer without and with speculation, and compare them."""
    drafter, draft_model = choose_drafter(AUTO_DRAFTER, "", settings.model)
    stack_settings = StackSettings(
        model=resolve_model(settings.model, settings.cache),
        drafter=drafter,
        draft_model=draft_model and resolve_model(draft_model, settings.cache),
        threads=settings.threads,
        k=settings.k,
    )
    check_before_start(stack_settings)
    if run_interruptible(lambda: _show(settings, stack_settings)):
        click.echo("interrupted", err=True)
        sys.exit(INTERRUPTED)


async def _show(settings: Settings, stack_settings: StackSettings) -> None:
    report = LocalStack(stack_settings, report=lambda line: click.echo(line, err=True))
    async with report as stack, AsyncClient(stack.address) as client:
        click.echo(f"ready at {stack.address}\n\n{click.style(PROMPT, dim=True)}\n")
        await client.complete(messages=_messages(), max_tokens=8)  # first calls are slower
        plain = await _stream(client, settings, speculation=False)
        speculative = await _stream(client, settings, speculation=True)
    Console().print(_table(plain, speculative))
    _compare(plain, speculative)


def _messages() -> list[dict[str, str]]:
    return [{"role": "user", "content": PROMPT}]


async def _stream(client: AsyncClient, settings: Settings, *, speculation: bool) -> Completion:
    click.echo(click.style(f"speculation {'on' if speculation else 'off'}", bold=True))
    if speculation and settings.color and sys.stdout.isatty():
        click.echo(legend())
    generation = client.generate(
        messages=_messages(),
        max_tokens=settings.max_tokens,
        temperature=0.0,
        speculation=speculation,
    )
    async for chunk in generation:
        write_chunk(chunk, color=settings.color)
    click.echo("\n")
    return await generation.complete()


def _table(plain: Completion, speculative: Completion) -> Table:
    headers = ("speculation", "tokens", "seconds", "tokens/s", "rounds")
    table = Table(*headers, "acceptance\nrate", "mean acceptance\nlength", box=box.SIMPLE)
    for name, completion in (("off", plain), ("on", speculative)):
        tokens, seconds = completion.usage.completion_tokens, completion.timings.total_s
        figures = completion.speculation
        table.add_row(
            name,
            str(tokens),
            f"{seconds:.2f}",
            f"{tokens / max(seconds, 1e-9):.1f}",
            str(figures.rounds),
            f"{figures.acceptance_rate:.1%}" if figures.draft_tokens else "-",
            f"{figures.mean_acceptance_length:.2f}",
        )
    return table


def _compare(plain: Completion, speculative: Completion) -> None:
    if plain.token_ids != speculative.token_ids or plain.text != speculative.text:
        pairs = zip(plain.token_ids, speculative.token_ids, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), "the end")
        raise InternalError(f"the texts differ, first at token {first}")
    ratio = plain.timings.total_s / max(speculative.timings.total_s, 1e-9)
    click.echo(f"both texts are equal; with speculation {ratio:.2f} times as fast")


command = settings_command(Settings, run, name="demo")
