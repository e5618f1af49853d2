"""A local stack under a command: what is checked before, and how signals end it."""

import asyncio
import signal
from collections.abc import Awaitable, Callable

import click

from outrider.local.commands import StackSettings, part_tls
from outrider.local.ports import take_port
from outrider.model.describe import describe
from outrider.model.draft_config import check_target, read_draft_config
from outrider.model.pairs import check_models
from outrider.session.redis import connect
from outrider.session.redis_tls import RedisTls
from outrider.tls import TlsFiles
from outrider.tokens import TokenFiles


def check_before_start(
    settings: StackSettings,
    *,
    redis_password_file: str = "",
    redis_tls: RedisTls | None = None,
) -> None:
    """Find out what would go wrong before any process is started.

    Raises:
        AddressInUseError: the port is taken.
        RecordsUnavailableError: a Redis of the user's own does not answer.
        ConfigError: the draft model was trained for another target, or a certificate or file of
            tokens can't be used.
        UnsupportedModelError: a model can't be served.
        TokenizerMismatchError: the draft model has another tokenizer than the target.
    """
    take_port(settings.host, settings.port)
    if settings.tls_dir is not None:
        for part in ("coordinator", "verify-worker", "draft-worker", "client"):
            TlsFiles(part_tls(settings.tls_dir, part))
    if settings.tokens:
        TokenFiles([settings.tokens])
    if settings.redis_url:
        asyncio.run(_ping(settings.redis_url, redis_password_file, redis_tls))
    describe(settings.model)
    if settings.draft_model:
        describe(settings.draft_model)
        if settings.draft_model != settings.model:
            click.echo("comparing the tokenizers of the two models", err=True)
            check_models(settings.model, settings.draft_model)
        trained = read_draft_config(settings.draft_model)
        if trained is not None:
            warning = check_target(settings.draft_model, trained, settings.model)
            if warning:
                click.echo(f"outrider: {warning}", err=True)


async def _ping(redis_url: str, password_file: str, tls: RedisTls | None) -> None:
    async with connect(redis_url, password_file=password_file, tls=tls) as redis:
        await redis.ping()


def run_interruptible(main: Callable[[], Awaitable[None]]) -> bool:
    """Run `main`; whether it was ended by SIGINT or SIGTERM.

    A signal cancels `main`, which then ends its processes in order; a second one hurries it.
    """
    try:
        asyncio.run(_with_signals(main))
    except asyncio.CancelledError:
        return True
    return False


async def _with_signals(main: Callable[[], Awaitable[None]]) -> None:
    task = asyncio.current_task()
    loop = asyncio.get_running_loop()
    if task is not None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
    await main()
