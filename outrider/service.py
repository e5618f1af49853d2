"""The life of a service process: settings, logs, telemetry, signals, exit code.

A service gives one coroutine that takes a `stop` event; it starts its parts, waits for the
event and ends them in order. SIGTERM and SIGINT set the event; a second one ends at once.
"""

import asyncio
import os
import signal
import socket
import sys
import uuid
from collections.abc import Awaitable, Callable

import click

from outrider import logs, telemetry
from outrider.errors import OutriderError

# 128 and the number of SIGINT, as shells have it.
INTERRUPTED = 130
Main = Callable[[asyncio.Event], Awaitable[None]]


class Abandoned(Exception):  # noqa: N818 - nothing went wrong
    """All is ended but a thread that can't be: the process ends without it, with 0."""


def run(
    main: Main,
    *,
    service: str,
    instance: str,
    log_level: str,
    otlp_endpoint: str | None,
    metrics_host: str,
    metrics_port: int,
) -> None:
    """Run `main` until it returns; an `OutriderError` is printed plainly and exits with 1.

    `main` may raise `Abandoned`.
    """
    logs.configure(log_level, service=service, instance=instance)
    try:
        end_telemetry = telemetry.start(
            service,
            instance=instance,
            otlp_endpoint=otlp_endpoint,
            metrics_host=metrics_host,
            metrics_port=metrics_port,
        )
        try:
            asyncio.run(_until_signal(main))
        finally:
            end_telemetry()
    except Abandoned:
        # Not by `sys.exit`, which takes apart what the thread is in the middle of.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    except OutriderError as error:
        click.echo(f"outrider {service}: {error.message}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:  # before the signals are ours, or after
        sys.exit(INTERRUPTED)


async def _until_signal(main: Main) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(INTERRUPTED)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    await main(stop)


def new_worker_id(pool: str) -> str:
    """A readable id for a worker that was given none."""
    return f"{pool}-{socket.gethostname()}-{uuid.uuid4().hex[:6]}"


def new_incarnation() -> str:
    """A fresh id for this start of a process."""
    return uuid.uuid4().hex
