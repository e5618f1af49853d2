"""The password of Redis out of a file: used, read again, and refused beside another one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.errors import ConfigError, RecordsUnavailableError
from outrider.session.credentials import with_password_file
from outrider.session.redis import connect
from tests.support.valkey import new_valkey


@pytest.fixture
def url() -> Iterator[str]:
    server = new_valkey()
    server.start()
    yield server.connection_url
    server.terminate()


async def test_a_password_that_changes_while_the_service_runs(url: str, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("first\n")
    async with connect(url) as before:
        await before.command("ACL", "SETUSER", "app", "on", ">first", "~*", "&*", "+@all")
        with_user = url.replace("redis://", "redis://app@")
        async with connect(with_user, password_file=str(file)) as redis:
            assert await redis.command("ACL", "WHOAMI") == b"app"
            await before.command("ACL", "SETUSER", "app", "resetpass", ">second")
            file.write_text("second")
            # Valkey ends the connections of a user whose password is gone, or we connect anew.
            await before.command("CLIENT", "KILL", "USER", "app")
            with pytest.raises(RecordsUnavailableError):
                await redis.ping()
            assert await redis.command("ACL", "WHOAMI") == b"app"


async def test_a_wrong_password_is_said(url: str, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("wrong")
    async with connect(url) as before:
        await before.command("CONFIG", "SET", "requirepass", "right")
    async with connect(url, password_file=str(file)) as redis:
        with pytest.raises(RecordsUnavailableError, match="check the user"):
            await redis.ping()
    file.write_text("right")
    async with connect(url, password_file=str(file)) as redis:
        await redis.ping()


def test_what_can_not_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't read --redis-password-file"):
        with_password_file("redis://host", str(tmp_path / "none"))
    file = tmp_path / "password"
    file.write_text("x")
    with pytest.raises(ConfigError, match="--redis-url has a password"):
        with_password_file("redis://user:secret@host", str(file))
    url, credentials = with_password_file("rediss://us%20er@[::1]:7/3?ssl_ca_certs=/ca", str(file))
    assert url == "rediss://[::1]:7/3?ssl_ca_certs=/ca"
    assert credentials is not None
    assert credentials.get_credentials() == ("us er", "x")
    assert with_password_file("redis://host", "") == ("redis://host", None)
