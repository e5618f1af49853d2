"""`outrider generate PROMPT`."""

import json
from dataclasses import dataclass

import click

from outrider.cli.display import (
    completion_json,
    completions_json,
    summary_line,
    write_chunk,
    write_completion,
)
from outrider.cli.requests import RequestSettings
from outrider.client import Client, Generation
from outrider.config import command as settings_command
from outrider.config import setting
from outrider.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(RequestSettings):
    """Completions of one prompt."""

    prompt: str = setting(help="The text to go on from.", argument=True)
    chat: bool = setting(False, help="Send the prompt as a user's message, not as raw text.")
    echo: bool = setting(False, help="Show the prompt too.")
    n: int = setting(1, at_least=1, help="So many completions, each with its own seed.")
    logprobs: int | None = setting(
        None, at_least=0, help="Log-probabilities of so many best tokens at each; needs --json."
    )
    logprobs_kind: str = setting(
        "raw",
        choices=("raw", "processed"),
        help="Of the target's own distribution, or of the one that is sampled from.",
    )
    previous_session_id: str = setting(
        "", help="A finished session whose prompt and answer come before the prompt."
    )
    json: bool = setting(False, help="Print one JSON object when all is there.")

    def __post_init__(self) -> None:
        # No super(): slots give a dataclass a new class, which it does not find.
        RequestSettings.__post_init__(self)
        if self.logprobs is not None and not self.json:
            raise ConfigError("--logprobs needs --json")


def run(settings: Settings) -> None:
    """Complete PROMPT and show the text as it comes."""
    with settings.client() as client, _start(client, settings) as generation:
        if settings.json:
            completions = generation.complete_all()
            several = len(completions) > 1
            found = completions_json(completions) if several else completion_json(completions[0])
            click.echo(json.dumps(found))
        elif settings.n > 1:
            _show_all(generation, settings)
        else:
            _show(generation, settings)


def _show(generation: Generation, settings: Settings) -> None:
    shown = False
    for chunk in generation:
        if not shown:
            _show_prompt(generation.prompt_text)
            shown = True
        write_chunk(chunk, color=settings.color)
    completion = generation.complete()
    if not shown:
        _show_prompt(completion.prompt_text)
    click.echo()
    click.echo(click.style(summary_line(completion), dim=True), err=True)


def _show_all(generation: Generation, settings: Settings) -> None:
    """One after the other once all are there: as they come, they would be mixed."""
    for completion in generation.complete_all():
        click.echo(click.style(f"--- {completion.index}", bold=True))
        _show_prompt(completion.prompt_text)
        write_completion(completion, color=settings.color)
        click.echo()
        click.echo(click.style(summary_line(completion), dim=True), err=True)


def _show_prompt(text: str) -> None:
    if text:
        click.echo(click.style(text, dim=True), nl=False)


def _start(client: Client, settings: Settings) -> Generation:
    options = settings.options()
    options["previous_session_id"] = settings.previous_session_id
    options["echo"] = settings.echo
    options["n"] = settings.n
    options["logprobs"] = settings.logprobs
    options["logprobs_kind"] = settings.logprobs_kind
    if not settings.chat:
        return client.generate(settings.prompt, **options)
    options["messages"] = [{"role": "user", "content": settings.prompt}]
    return client.generate(**options)


command = settings_command(Settings, run, name="generate")
