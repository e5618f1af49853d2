"""`outrider coordinator | verify-worker | draft-worker`: become the service."""

import os
import sys

import click

SERVICES = {
    "coordinator": "coordinator",
    "verify-worker": "verify_worker",
    "draft-worker": "draft_worker",
}


def service_command(name: str) -> click.Command:
    """A command that hands every argument, `--help` included, to `python -m SERVICE`."""

    def run(arguments: tuple[str, ...]) -> None:
        os.execv(sys.executable, [sys.executable, "-m", SERVICES[name], *arguments])

    return click.Command(
        name,
        callback=run,
        params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
        add_help_option=False,
        context_settings={"ignore_unknown_options": True},
    )
