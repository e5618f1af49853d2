"""Health checks and heartbeats follow the engine, and not only its process."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider import rpc
from outrider.clock import AwakeClock
from outrider.messages import Heartbeat
from outrider.pulse import Pulse
from verify_worker.engine import Engine
from verify_worker.health import heartbeat, keep_health
from verify_worker.servicer import Identity

STATUS = health_pb2.HealthCheckResponse.ServingStatus


class Worker:
    """The parts of a worker that its health is made of; its engine lives on `now`."""

    def __init__(self, server: rpc.Server, stub: Any) -> None:
        self.now = 0.0
        awake = AwakeClock(0.01, lambda: self.now)
        self.pulse = Pulse(awake)
        # Nothing else of an engine matters here.
        self.engine = cast(Engine, SimpleNamespace(awake=awake, pulse=self.pulse))
        self.identity = Identity("v1", "i1")
        self.stub = stub
        self.task = asyncio.create_task(keep_health(server, self.engine, self.identity, 5.0))

    async def pass_time(self, seconds: float) -> None:
        """In steps that the clock takes for time in which it was awake."""
        before = self.engine.awake.seconds
        while self.engine.awake.seconds < before + seconds - 1e-6:
            self.now += 0.02
            await asyncio.sleep(0)
            self.engine.awake.tick()

    async def says(self, status: int, service: str = "") -> None:
        request = health_pb2.HealthCheckRequest(service=service)
        for _ in range(3000):
            if (await self.stub.Check(request)).status == status:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"health never became {status}")


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    server = rpc.Server()
    port = await server.start("outrider.v1.VerifyService", "127.0.0.1", 0)
    async with rpc.open_channel(f"127.0.0.1:{port}") as channel:
        worker = Worker(server, health_pb2_grpc.HealthStub(channel))
        yield worker
        worker.task.cancel()
        await asyncio.wait([worker.task])
    await server.stop(0)


async def test_case_35_not_serving_while_the_engine_hangs(worker: Worker) -> None:
    await worker.says(STATUS.SERVING)
    worker.pulse.begin()
    await worker.pass_time(5.1)
    await worker.says(STATUS.NOT_SERVING)
    await worker.says(STATUS.NOT_SERVING, rpc.LIVENESS)
    assert heartbeat(worker.engine, worker.identity).silent_ms >= 5000
    worker.pulse.rest()
    await worker.says(STATUS.SERVING, rpc.LIVENESS)
    await worker.says(STATUS.SERVING)
    assert heartbeat(worker.engine, worker.identity) == Heartbeat()


async def test_case_35_serving_through_steps_that_are_known_to_be_long(worker: Worker) -> None:
    await worker.says(STATUS.SERVING)
    for _ in range(3):
        worker.pulse.begin(expected_s=20.0)
        await worker.pass_time(30.0)
        assert heartbeat(worker.engine, worker.identity).silent_ms == 0
        await worker.says(STATUS.SERVING)


async def test_not_serving_while_it_drains(worker: Worker) -> None:
    await worker.says(STATUS.SERVING)
    worker.identity.draining = True
    await worker.says(STATUS.NOT_SERVING)
    # That is no reason to start it again.
    await worker.says(STATUS.SERVING, rpc.LIVENESS)
    assert heartbeat(worker.engine, worker.identity) == Heartbeat(draining=True)
    worker.identity.draining = False
    await worker.says(STATUS.SERVING)
