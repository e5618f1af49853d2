"""`outrider up`."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from outrider.callers import COORDINATOR_NAME
from outrider.cli.models import AUTO_DRAFTER, choose_drafter, resolve_model
from outrider.cli.running import check_before_start, run_interruptible
from outrider.config import CACHE, setting
from outrider.config import command as settings_command
from outrider.draft_length import AUTO, parse_draft_length
from outrider.errors import UnavailableError
from outrider.local.commands import DRAFTERS, NUMERICS, StackSettings, part_tls
from outrider.local.stack import COORDINATOR, VALKEY, LocalStack
from outrider.logs import LEVELS
from outrider.model.embedded import EMBEDDED_MODEL
from outrider.service_settings import RedisTlsSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(RedisTlsSettings):
    """What to start."""

    model: str = setting(
        EMBEDDED_MODEL, help="The target: a transformers directory, a .gguf file, or this name."
    )
    drafter: str = setting(
        AUTO_DRAFTER,
        choices=(AUTO_DRAFTER, *DRAFTERS),
        help="auto: hybrid where there is a draft model, else suffix. ngram looks up the session's "
        "own text, suffix that and earlier outputs; model runs a draft model, early-exit the "
        "target's first layers, hybrid suffix beside a model.",
    )
    draft_model: str = setting(
        "",
        help="The draft model, for --drafter model and hybrid; the embedded model has its own.",
    )
    draft_workers: int = setting(1, at_least=0, help="How many draft workers.")
    verify_workers: int = setting(1, at_least=1, help="How many verify workers.")
    redis_url: str = setting("", help="A Redis to use; an embedded Valkey is started if empty.")
    redis_password_file: str = setting("", help="File with the password of that Redis.")
    tls: str = setting(
        "",
        help="Directory with certificates, which switches TLS on: ca.crt, and .crt and .key of "
        "coordinator, verify-worker, draft-worker and client.",
    )
    tokens: str = setting(
        "", help="File with the tokens of clients; without one a call needs no token."
    )
    port: int = setting(7070, at_least=0, at_most=65535, help="Port of the coordinator.")
    threads: int = setting(
        0, at_least=0, help="Threads of each process with a model; 0 shares out the cores."
    )
    k: str = setting(AUTO, help="Draft length of each round: auto or fixed:N.")
    numerics: str = setting(
        "fast",
        choices=NUMERICS,
        help="invariant: logits depend on nothing but a session's own tokens, bit for bit.",
    )
    trust_drafts: bool = setting(
        False, help="Vouch for the draft workers, which the rejection rule needs."
    )
    log_level: str = setting("info", choices=LEVELS, help="Least severe level in the log files.")
    otlp_endpoint: str | None = setting(None, help="OTLP gRPC collector for traces and metrics.")
    cache: str = setting(CACHE, help="Directory for the embedded model.")

    def __post_init__(self) -> None:
        parse_draft_length(self.k)
        choose_drafter(self.drafter, self.draft_model, self.model)


def run(settings: Settings) -> None:
    """Start coordinator, workers and records on this machine, until Ctrl-C."""
    drafter, draft_model = choose_drafter(settings.drafter, settings.draft_model, settings.model)
    draft_path = draft_model and resolve_model(draft_model, settings.cache)
    stack_settings = StackSettings(
        model=resolve_model(settings.model, settings.cache),
        drafter=drafter,
        draft_model=draft_path,
        draft_workers=settings.draft_workers,
        verify_workers=settings.verify_workers,
        redis_url=settings.redis_url,
        port=settings.port,
        threads=settings.threads,
        k=settings.k,
        numerics=settings.numerics,
        trust_drafts=settings.trust_drafts,
        tls_dir=Path(settings.tls).expanduser() if settings.tls else None,
        tokens=settings.tokens,
        redis_flags=tuple(_redis_flags(settings)),
        log_level=settings.log_level,
        otlp_endpoint=settings.otlp_endpoint,
    )
    check_before_start(
        stack_settings,
        redis_password_file=settings.redis_password_file,
        redis_tls=settings.redis_tls(),
    )
    if run_interruptible(lambda: _serve(stack_settings)):
        click.echo("stopped", err=True)


def _redis_flags(settings: Settings) -> Iterator[str]:
    for name in ("redis_password_file", "redis_ca", "redis_cert", "redis_key"):
        if value := getattr(settings, name):
            yield from (f"--{name.replace('_', '-')}", value)


async def _serve(settings: StackSettings) -> None:
    stack = LocalStack(settings, report=lambda line: click.echo(line, err=True))
    async with stack:
        click.echo(_summary(stack))
        await _watch(stack)


async def _watch(stack: LocalStack) -> None:
    """Tell of processes that end; without coordinator or records there is nothing left to do."""
    try:
        while True:
            child = await stack.first_death()
            end = f"{child.name} ended with exit code {child.exit_code}; its log: {child.log_path}"
            if child.name in (COORDINATOR, VALKEY):
                raise UnavailableError(f"{end}\n{child.log_tail()}")
            click.echo(f"outrider: {end}", err=True)
    except asyncio.CancelledError:
        click.echo("stopping; once more to stop at once", err=True)
        raise


def _summary(stack: LocalStack) -> str:
    settings = stack.settings
    drafter = settings.draft_model or settings.drafter
    # An address of the user's own may hold a password.
    records = "" if settings.redis_url else f"  records  {stack.redis_url}\n"
    server = "" if stack.address.endswith(":7070") else f" --coordinator {stack.address}"
    if settings.tls_dir is not None:
        tls = part_tls(settings.tls_dir, "client")
        server += f" --tls-ca {tls.ca} --tls-cert {tls.cert} --tls-key {tls.key}"
        server += f" --tls-name {COORDINATOR_NAME}"
    if settings.tokens:
        server += " --token-file FILE"
    return (
        f"ready at {stack.address}\n"
        f"  target   {settings.model}\n"
        f"  drafter  {drafter}\n"
        f"{records}  logs     {stack.run_dir}\n"
        f"try it:    outrider generate{server} 'Once upon a time' --max-tokens 64\n"
        f"           outrider status{server}\n"
        "Ctrl-C stops everything"
    )


command = settings_command(Settings, run, name="up")
