"""`outrider policy`."""

import asyncio
import json
from dataclasses import dataclass

import click

from outrider.cli.requests import RULES
from outrider.config import command as settings_command
from outrider.config import setting
from outrider.draft_length import parse_draft_length
from outrider.messages import AcceptanceRule
from outrider.service_settings import RedisTlsSettings
from outrider.session.policy import SWITCH, Policy, PolicyStore
from outrider.session.redis import connect

# No draft length of the policy's own.
WORKER = "worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(RedisTlsSettings):
    """Where the policy is, and what to change in it."""

    redis_url: str = setting(help="Redis of the coordinators: redis://HOST:PORT/DB.")
    redis_password_file: str = setting("", help="File with the password of Redis.")
    # Not from the environment: what `generate` takes there must not change everybody's policy.
    rule: str | None = setting(None, choices=RULES, env=False, help="How drafts are accepted.")
    speculation: str | None = setting(
        None, choices=tuple(SWITCH), env=False, help="Whether to speculate."
    )
    k: str | None = setting(
        None,
        env=False,
        help="Draft length of each round: auto or fixed:N; worker leaves it to the verify workers.",
    )
    json: bool = setting(False, help="Print one JSON object.")

    def __post_init__(self) -> None:
        if self.k not in (None, WORKER):
            parse_draft_length(str(self.k))


def run(settings: Settings) -> None:
    """Show the policy, after setting what is given.

    It says what requests get that leave it open. The rejection rule is only used with draft
    workers that the coordinator trusts (--trust-draft-worker); without one, requests that
    leave the rule open get the coupled one.
    """
    policy = asyncio.run(_apply(settings))
    rule, speculation = policy.rule.value, "on" if policy.speculation else "off"
    k = policy.k or WORKER
    if settings.json:
        found = {"version": policy.version, "rule": rule, "speculation": speculation, "k": k}
        click.echo(json.dumps(found))
        return
    version = f"version {policy.version}" if policy.version else "never set: the defaults"
    click.echo(f"rule {rule}, speculation {speculation}, k {k} ({version})")


async def _apply(settings: Settings) -> Policy:
    async with connect(
        settings.redis_url,
        password_file=settings.redis_password_file,
        tls=settings.redis_tls(),
    ) as redis:
        store = PolicyStore(redis)
        if (settings.rule, settings.speculation, settings.k) != (None, None, None):
            await store.change(
                rule=AcceptanceRule(settings.rule) if settings.rule else None,
                speculation=SWITCH[settings.speculation] if settings.speculation else None,
                k="" if settings.k == WORKER else settings.k,
            )
        return await store.read() or Policy()


command = settings_command(Settings, run, name="policy")
