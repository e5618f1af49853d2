"""`outrider generate PROMPT`."""

import json
from dataclasses import dataclass

import click

from outrider.cli.display import completion_json, summary_line, write_chunk
from outrider.cli.requests import RequestSettings
from outrider.client import Client, Generation
from outrider.config import command as settings_command
from outrider.config import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(RequestSettings):
    """One completion."""

    prompt: str = setting(help="The text to go on from.", argument=True)
    chat: bool = setting(False, help="Send the prompt as a user's message, not as raw text.")
    json: bool = setting(False, help="Print one JSON object when all is there.")


def run(settings: Settings) -> None:
    """Complete PROMPT and show the text as it comes."""
    with Client(settings.server) as client, _start(client, settings) as generation:
        if settings.json:
            click.echo(json.dumps(completion_json(generation.complete())))
            return
        for chunk in generation:
            write_chunk(chunk, color=settings.color)
        click.echo()
        click.echo(click.style(summary_line(generation.complete()), dim=True), err=True)


def _start(client: Client, settings: Settings) -> Generation:
    options = settings.options()
    if not settings.chat:
        return client.generate(settings.prompt, **options)
    options["messages"] = [{"role": "user", "content": settings.prompt}]
    return client.generate(**options)


command = settings_command(Settings, run, name="generate")
