"""`outrider fetch-model`."""

from dataclasses import dataclass

import click

from outrider.cli.models import fetch_embedded_model
from outrider.config import CACHE, setting
from outrider.config import command as settings_command


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Where to put it."""

    cache: str = setting(CACHE, help="Directory for what is fetched.")


def run(settings: Settings) -> None:
    """Fetch and convert the embedded model once, and print where it is."""
    click.echo(fetch_embedded_model(settings.cache))


command = settings_command(Settings, run, name="fetch-model")
