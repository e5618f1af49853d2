"""`outrider token`."""

from dataclasses import dataclass

import click

from outrider.config import command as settings_command
from outrider.config import setting
from outrider.tokens import Role, append, new_token


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Whose token, and where its hash goes."""

    tenant: str = setting(env=False, help="Whose sessions the token gives access to.")
    admin: bool = setting(False, env=False, help="It may see and drain workers too.")
    tokens: str = setting(
        env=False, help="Tokens file to add it to, which coordinators read (--tokens)."
    )


def run(settings: Settings) -> None:
    """Make a token, add its hash to a tokens file and print it, once.

    Coordinators that have the file notice. To end a token take its line out: the line begins with
    the eight characters that the token has after `outrider-`.
    """
    role = Role.ADMIN if settings.admin else Role.TENANT
    token, holder = new_token(settings.tenant, role)
    append(settings.tokens, holder)
    click.echo(token)


@click.group("token")
def command() -> None:
    """Make tokens for clients."""


command.add_command(settings_command(Settings, run, name="create"))
