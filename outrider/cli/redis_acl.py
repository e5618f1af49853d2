"""`outrider redis-acl`."""

from dataclasses import dataclass

import click

from outrider.config import command as settings_command
from outrider.config import setting
from outrider.errors import ConfigError
from outrider.reloading import read_file
from outrider.session.acl import RIGHTS, acl_line

ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Whose rights."""

    part: str = setting(
        ALL, env=False, choices=(ALL, *RIGHTS), help="Whose user; all prints every part's."
    )
    password_file: str = setting(
        "", env=False, help="File with the user's password, of which the hash is printed."
    )

    def __post_init__(self) -> None:
        if self.password_file and self.part == ALL:
            raise ConfigError("--password-file needs --part: each user has a password of its own")


def run(settings: Settings) -> None:
    """Print the Redis users of Outrider's parts, as lines of an ACL file.

    Each may do what its part does and no more. Without --password-file a user can't log in before
    it has a password: `ACL SETUSER outrider-coordinator >PASSWORD`.
    """
    password = ""
    if settings.password_file:
        password = read_file(settings.password_file, "--password-file").decode().rstrip("\r\n")
    for part in RIGHTS if settings.part == ALL else (settings.part,):
        click.echo(acl_line(part, password))


command = settings_command(Settings, run, name="redis-acl")
