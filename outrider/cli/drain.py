"""`outrider drain WORKER`."""

import sys
import time
from contextlib import suppress
from dataclasses import dataclass

import click

from outrider.cli.connection import ConnectionSettings
from outrider.client import Status
from outrider.config import command as settings_command
from outrider.config import setting
from outrider.errors import ConfigError, NotFoundError

POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(ConnectionSettings):
    """Which worker, and how long to wait for it."""

    worker: str = setting(help="Id of a verify worker or draft worker.", argument=True)
    undo: bool = setting(False, env=False, help="Have it take sessions again.")
    wait_s: float = setting(
        60.0, at_least=0, help="Seconds to wait until no session is left on the worker."
    )

    def __post_init__(self) -> None:
        if not self.worker:
            raise ConfigError("the id of a worker is needed; `outrider status` shows them")


def run(settings: Settings) -> None:
    """Have WORKER give up its sessions and take no more, so that it can be stopped.

    Sessions are moved to other workers that can take them, else they finish. A worker that is
    started again serves again. Exits with 1 when sessions are left after --wait-s.
    """
    with settings.client() as client:
        meant = _incarnations(client.status(), settings.worker)
        left = client.drain(settings.worker, draining=not settings.undo)
        if settings.undo:
            click.echo(f"{settings.worker} takes sessions again")
            return
        deadline = time.monotonic() + settings.wait_s
        while left and time.monotonic() < deadline:
            time.sleep(POLL_S)
            if meant and not meant & _incarnations(client.status(), settings.worker):
                left = 0  # it has gone; one that was started again is to serve
                break
            with suppress(NotFoundError):  # it has gone just now
                left = client.drain(settings.worker)
    if left:
        click.echo(f"{settings.worker} still has {left} sessions, and takes no more", err=True)
        sys.exit(1)
    click.echo(f"{settings.worker} has no sessions and takes no more; it can be stopped")


def _incarnations(status: Status, worker_id: str) -> set[str]:
    return {worker.incarnation for worker in status.workers if worker.worker_id == worker_id}


command = settings_command(Settings, run, name="drain")
