"""Cases of clients that leave, clash or wait, on a system of real processes."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.cluster import Cluster, Size
from bench.load import LETTERS
from bench.paced_worker import paced
from bench.tiny import write_model
from bench.workers import holdings, running_records
from outrider import rpc
from outrider.client import AsyncClient
from outrider.errors import DeadlineError, SessionExistsError
from outrider.local.commands import StackSettings
from outrider.pb.v1 import coordinator_pb2 as pb
from outrider.pb.v1 import coordinator_pb2_grpc

PROMPT = [1, 2, 3, 4, 5]
STREAMS, AT_ONCE = 500, 50
# A minute, most of it spent asleep.
PREFILL_STEPS, PREFILL_ROWS, PREFILL_STEP_S = 15, 16, 4.1

pytestmark = pytest.mark.timeout(300)


@asynccontextmanager
async def running(
    directory: Path, *, pace_s: float, coordinators: int = 1, **settings: Any
) -> AsyncIterator[Cluster]:
    model = write_model(directory / "model", letters=LETTERS)
    size = Size(coordinators=coordinators, verify_workers=1, draft_workers=1)
    stack = StackSettings(model=str(model), threads=1, **settings)
    async with Cluster(stack, size=size, stand_ins=paced(("verify-1",), pace_s)) as cluster:
        yield cluster


async def until(condition: Callable[[], Coroutine[Any, Any, bool]], what: str) -> None:
    deadline = time.monotonic() + 30
    while not await condition():
        assert time.monotonic() < deadline, f"it never came about: {what}"
        await asyncio.sleep(0.05)


async def all_idle(client: AsyncClient) -> bool:
    held = await holdings(client)
    return len(held) == 2 and all(worker.idle for worker in held)


async def verify_address(client: AsyncClient) -> str:
    workers = (await client.status()).workers
    return next(worker.address for worker in workers if worker.pool == "verify")


@pytest.mark.parametrize("how", ["cut", "cancelled", "connection closed"])
async def test_case_27_streams_cut_after_the_first_token(tmp_path: Path, how: str) -> None:
    """The workers hold nothing afterwards, and no process grows with the streams it has seen."""

    async def wave(address: str) -> None:
        async with AsyncExitStack() as exit_stack:
            channels = [
                await exit_stack.enter_async_context(rpc.open_channel(address))
                for _ in range(AT_ONCE if how == "connection closed" else 1)
            ]
            await asyncio.gather(
                *(one(channels[number % len(channels)]) for number in range(AT_ONCE))
            )

    async def one(channel: grpc.aio.Channel) -> None:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        prompt = pb.GenerateRequest(max_tokens=200)
        prompt.token_ids.ids.extend(PROMPT)
        call = stub.Generate(prompt)
        session_id = ""
        while isinstance(response := await call.read(), pb.GenerateResponse):
            session_id = response.started.session_id or session_id
            if response.WhichOneof("event") == "delta":
                break
        if how == "cancelled":
            assert (await stub.Cancel(pb.CancelRequest(session_id=session_id))).cancelled
            while await call.read() is not grpc.aio.EOF:
                pass
        elif how == "cut":
            call.cancel()
        # Else the stream is open when its connection closes.

    async with (
        running(tmp_path, pace_s=0.01) as cluster,
        AsyncClient(cluster.addresses) as client,
    ):
        processes = {name: psutil.Process(cluster.process(name).pid) for name in cluster.services}
        memory: dict[str, int] = {}
        for number in range(STREAMS // AT_ONCE):
            await wave(cluster.addresses[0])
            await until(lambda: all_idle(client), "blocks and sessions are given back")
            if number == STREAMS // AT_ONCE // 2:
                memory = {name: p.memory_info().rss for name, p in processes.items()}
        after = {name: p.memory_info().rss for name, p in processes.items()}
        assert {name for name in after if after[name] > 1.1 * memory[name]} == set()

        async def none_runs() -> bool:
            return await running_records(cluster.redis_url) == []

        await until(none_runs, "no record says running")


async def test_case_28_two_requests_with_the_same_id_at_the_same_time(tmp_path: Path) -> None:
    """One of them gets it, at whichever coordinator, and says what it says alone."""
    prompts = ([1, 2, 3], [7, 7, 7, 7])
    async with (
        running(tmp_path, pace_s=0.01, coordinators=2) as cluster,
        AsyncClient(cluster.addresses[0]) as one,
        AsyncClient(cluster.addresses[1]) as other,
    ):
        alone = [(await one.complete(token_ids=p, max_tokens=24)).token_ids for p in prompts]
        assert alone[0] != alone[1]
        for number in range(6):
            clients = (one, one) if number % 2 else (one, other)
            results = await asyncio.gather(
                *(
                    client.complete(token_ids=prompt, max_tokens=24, session_id=f"same-{number}")
                    for client, prompt in zip(clients, prompts, strict=True)
                ),
                return_exceptions=True,
            )
            (loser,) = [r for r in results if isinstance(r, BaseException)]
            assert isinstance(loser, SessionExistsError)
            index = 1 - results.index(loser)
            winner = results[index]
            assert not isinstance(winner, BaseException)
            assert winner.token_ids == alone[index]


async def test_case_33_and_35_a_long_prefill_is_silent_and_healthy(tmp_path: Path) -> None:
    """No connection is given up meanwhile, and nobody takes the worker for hung."""
    healths: list[int] = []
    prompt = [n % LETTERS for n in range(PREFILL_ROWS * PREFILL_STEPS)]
    flags = ("--step-tokens", str(PREFILL_ROWS), "--no-calibrate", "--no-prefix-cache")
    async with (
        running(tmp_path, pace_s=PREFILL_STEP_S, verify_flags=flags) as cluster,
        AsyncClient(cluster.addresses) as client,
    ):
        address = await verify_address(client)

        async def watch() -> None:
            async with rpc.open_channel(address) as channel:
                health = health_pb2_grpc.HealthStub(channel)
                while True:
                    request = health_pb2.HealthCheckRequest(service="")
                    healths.append((await health.Check(request, timeout=20)).status)
                    await asyncio.sleep(1)

        watching = asyncio.create_task(watch())
        generation = client.generate(token_ids=prompt, max_tokens=2)
        completion = await generation.complete()
        assert not watching.done()
        watching.cancel()
        info = await client.get_session(completion.session_id)
    assert len(completion.token_ids) == 2
    assert generation.reconnects == 0
    assert info.epoch == 1  # it was never placed again
    assert len(healths) >= PREFILL_STEPS
    assert set(healths) == {health_pb2.HealthCheckResponse.SERVING}


async def test_case_33_the_first_call_after_a_worker_restart(tmp_path: Path) -> None:
    async with (
        running(tmp_path, pace_s=0.01, coordinator_flags=("--place-wait-s", "60")) as cluster,
        AsyncClient(cluster.addresses) as client,
    ):
        before = await client.complete(token_ids=PROMPT, max_tokens=8)
        await cluster.kill("verify-1")
        await cluster.start_process("verify-1")
        after = await client.complete(token_ids=PROMPT, max_tokens=8)
        assert after.token_ids == before.token_ids


async def test_case_33_work_stops_when_the_deadline_passes(tmp_path: Path) -> None:
    async with (
        running(tmp_path, pace_s=0.2) as cluster,
        AsyncClient(cluster.addresses) as client,
    ):
        # 200 tokens would take 40 s.
        generation = client.generate(token_ids=PROMPT, max_tokens=200, timeout_s=2.0)
        seen: list[int] = []

        async def read() -> None:
            async for chunk in generation:
                seen.extend(chunk.token_ids)

        with pytest.raises(DeadlineError):
            await read()
        assert 0 < len(seen) < 200
        await until(lambda: all_idle(client), "the workers stop")


async def test_case_35_a_worker_that_is_stopped_does_not_say_that_it_serves(
    tmp_path: Path,
) -> None:
    async with (
        running(tmp_path, pace_s=0.01) as cluster,
        AsyncClient(cluster.addresses) as client,
    ):
        address = await verify_address(client)
        async with rpc.open_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service="")
            serving = health_pb2.HealthCheckResponse.SERVING
            assert (await health.Check(request, timeout=20)).status == serving
            cluster.pause("verify-1")
            with pytest.raises(grpc.RpcError):
                await health.Check(request, timeout=1)

            async def left_out() -> bool:
                status = await client.status()
                return not any(w.connected for w in status.workers if w.pool == "verify")

            await until(left_out, "the coordinator leaves it out")
            cluster.go_on("verify-1")

            async def serves() -> bool:
                return (await health.Check(request, timeout=20)).status == serving

            await until(serves, "it says that it serves again")
