"""`outrider chat`."""

import importlib
from contextlib import suppress
from dataclasses import dataclass

import click

from outrider.cli.display import speculation_line, write_chunk
from outrider.cli.requests import RequestSettings
from outrider.client import Client, Completion
from outrider.config import command as settings_command
from outrider.config import setting
from outrider.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(RequestSettings):
    """One conversation."""

    system: str = setting("", help="A system message to begin with.")


def run(settings: Settings) -> None:
    """Talk to the model; /reset forgets the conversation, /quit or Ctrl-D leaves.

    Ctrl-C ends the answer that is being given.
    """
    with suppress(ImportError):
        importlib.import_module("readline")  # gives input() a history and editing keys
    with settings.client() as client:
        model = ", ".join(m.name for m in client.list_models()) or "no model yet"
        where = ", ".join(settings.coordinator)
        click.echo(f"{model} at {where}. /reset forgets, /quit leaves.", err=True)
        _converse(client, settings)


def _converse(client: Client, settings: Settings) -> None:
    opening = [{"role": "system", "content": settings.system}] if settings.system else []
    messages = list(opening)
    while (line := _read_line()) is not None:
        match line.strip():
            case "":
                continue
            case "/quit":
                return
            case "/reset":
                messages = list(opening)
                click.echo("forgotten", err=True)
                continue
        messages.append({"role": "user", "content": line})
        try:
            completion = _answer(client, settings, messages)
        except InvalidRequestError as error:  # such as a conversation that has become too long
            click.echo(f"outrider: {error.message}", err=True)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": completion.text})
        click.echo(click.style(speculation_line(completion.speculation), dim=True), err=True)


def _read_line() -> str | None:
    """The next line; None at Ctrl-D, an empty one at Ctrl-C."""
    try:
        return input("> ")
    except KeyboardInterrupt:
        click.echo()
        return ""
    except EOFError:
        click.echo()
        return None


def _answer(client: Client, settings: Settings, messages: list[dict[str, str]]) -> Completion:
    options = settings.options()
    options["messages"] = messages
    generation = client.generate(**options)
    try:
        for chunk in generation:
            write_chunk(chunk, color=settings.color)
    except KeyboardInterrupt:
        generation.cancel()
    click.echo()
    return generation.complete()


command = settings_command(Settings, run, name="chat")
