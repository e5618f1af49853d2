"""A draft worker that drains, on SIGTERM or because it is told to."""

import asyncio
import signal
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2

from outrider.messages import CloseDraft
from outrider.session.registry import Pool
from tests.support.draft_process import (
    DEADLINE_S,
    committed,
    drafted,
    ended,
    health,
    opened,
    peer,
    reason,
    running,
)
from tests.support.valkey import new_valkey


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with new_valkey() as server:
        yield server.connection_url


async def test_sigterm_lets_sessions_leave_and_exits_with_0(redis_url: str) -> None:
    async with running(redis_url, "leaving", "--drain-timeout-s", "60") as worker:
        async with peer(worker) as stream:
            await stream.say(opened("s", 1, 2, 3, 4, 1, 2))
            await stream.next()
            worker.process.send_signal(signal.SIGTERM)
            # It stays in the registry, so that coordinators see why it takes nothing.
            await worker.until_draining(True)
            assert await health(worker.record.address) == health_pb2.HealthCheckResponse.NOT_SERVING
            await stream.say(opened("new", 1, 2, 3))
            assert reason(await stream.next()) == "OVERLOADED"
            await stream.say(committed("s", 6, 3))
            assert drafted(await stream.next()) == ("s", 7, (4, 1, 2))
            await stream.say(CloseDraft(session_id="s", epoch=1))
            async with asyncio.timeout(DEADLINE_S):
                assert await stream.call.read() is grpc.aio.EOF
        assert (await ended(worker.process))[0] == 0
        assert await worker.sessions() == -1


async def test_it_drains_and_serves_again_as_it_is_told(redis_url: str) -> None:
    async with running(redis_url, "told") as worker:
        async with peer(worker) as stream:
            await stream.say(opened("s", 1, 2, 3, 4, 1, 2))
            await stream.next()
            assert await worker.registry.order(Pool.DRAFT, "told", draining=True)
            await worker.until_draining(True)
            assert await health(worker.record.address) == health_pb2.HealthCheckResponse.NOT_SERVING
            await stream.say(opened("new", 1, 2, 3))
            assert reason(await stream.next()) == "OVERLOADED"
            await stream.say(committed("s", 6, 3))
            assert drafted(await stream.next()) == ("s", 7, (4, 1, 2))
            assert await worker.registry.order(Pool.DRAFT, "told", draining=False)
            await worker.until_draining(False)
            assert await health(worker.record.address) == health_pb2.HealthCheckResponse.SERVING
            await stream.say(opened("new", 1, 2, 3, 1, 2))
            assert drafted(await stream.next()) == ("new", 5, (3, 1, 2))
        worker.process.send_signal(signal.SIGTERM)
        assert (await ended(worker.process))[0] == 0


async def test_sigterm_does_not_wait_for_ever(redis_url: str) -> None:
    async with running(redis_url, "stuck", "--drain-timeout-s", "0.2") as worker:
        async with peer(worker) as stream:
            await stream.say(opened("s", 1, 2, 3, 4, 1, 2))
            await stream.next()
            worker.process.send_signal(signal.SIGTERM)
            code, errors = await ended(worker.process)
        assert code == 0
        assert "sessions are left behind" in errors
