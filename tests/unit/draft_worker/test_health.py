"""A draft worker is well while its engine gets on, and not while a call of the drafter hangs."""

import asyncio
from collections.abc import Sequence
from queue import SimpleQueue

from grpc_health.v1 import health_pb2, health_pb2_grpc

from draft_worker.engine import Engine
from draft_worker.health import Health
from outrider import rpc
from outrider.drafting.base import DraftRequest
from outrider.drafting.ngram import NgramDrafter
from outrider.messages import Draft, DraftEvent, OpenDraft, SamplingParams

STATUS = health_pb2.HealthCheckResponse.ServingStatus
SILENCE_S = 0.05


class HangingDrafter(NgramDrafter):
    """Waits to be let on."""

    def __init__(self) -> None:
        super().__init__(ngram_min=1, ngram_max=2)
        self.gate: SimpleQueue[None] = SimpleQueue()

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        self.gate.get(timeout=60)
        return super().propose(requests)


async def test_health_follows_the_engine() -> None:
    drafter = HangingDrafter()
    engine = Engine(drafter, max_sessions=4)
    server = rpc.Server()
    port = await server.start("outrider.v1.DraftService", "127.0.0.1", 0)
    async with rpc.open_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def becomes(alive: int, ready: int) -> None:
            said = (-1, -1)
            for _ in range(3000):
                asked = [health_pb2.HealthCheckRequest(service=s) for s in (rpc.LIVENESS, "")]
                said = ((await stub.Check(asked[0])).status, (await stub.Check(asked[1])).status)
                if said == (alive, ready):
                    return
                await asyncio.sleep(0.02)
            raise AssertionError(f"alive and ready are {said}")

        await becomes(STATUS.NOT_SERVING, STATUS.NOT_SERVING)  # as long as nothing is loaded
        engine.start()
        welcome = [False]
        health = Health(server, engine, lambda: welcome[0], SILENCE_S)
        keeping = asyncio.create_task(health.keep())
        events: SimpleQueue[Sequence[DraftEvent]] = SimpleQueue()
        try:
            await becomes(STATUS.SERVING, STATUS.NOT_SERVING)
            welcome[0] = True
            await becomes(STATUS.SERVING, STATUS.SERVING)
            opened = OpenDraft(
                session_id="s", epoch=1, token_ids=(1, 2, 1), sampling=SamplingParams(), draft_len=2
            )
            engine.submit(engine.open_stream(events.put), [opened])
            await becomes(STATUS.NOT_SERVING, STATUS.NOT_SERVING)
            drafter.gate.put(None)
            await becomes(STATUS.SERVING, STATUS.SERVING)
            assert await asyncio.to_thread(events.get, timeout=60)
        finally:
            drafter.gate.put(None)
            await asyncio.to_thread(engine.stop)
            keeping.cancel()
            await asyncio.wait([keeping])
            await server.stop(0)
