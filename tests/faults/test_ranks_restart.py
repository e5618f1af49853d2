"""While the ranks of a verify worker start anew it listens and says so, and it can be stopped."""

import asyncio
import os
import signal
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider import rpc
from outrider.errors import RankLostError
from outrider.local.ports import take_port
from outrider.model.parallel.shards import Shard, load_shard
from outrider.pb.v1 import verify_pb2, verify_pb2_grpc
from outrider.service import Abandoned
from tests.support.models import save_model
from tests.support.ranks import ForkedRanks
from tests.support.valkey import new_valkey
from verify_worker import app
from verify_worker import ranks as ranks_module
from verify_worker.app import VerifyWorker
from verify_worker.config import Settings
from verify_worker.target import Target, load_target

pytestmark = pytest.mark.timeout(180)

STATUS = health_pb2.HealthCheckResponse.ServingStatus


class Gate:
    """Loads targets, but for those that it is told to hold back."""

    def __init__(self) -> None:
        self.loads = 0
        self.open = threading.Event()
        self.open.set()
        self.closed = False
        self._left: list[weakref.ref[object]] = []
        self._released = 0

    def load(self, *arguments: Any) -> Target:
        assert self._released == self.loads + 1
        self.loads += 1
        self.open.wait()
        if self.closed:
            raise RankLostError("the test is over")
        target = load_target(*arguments)
        self._left.append(weakref.ref(target.model))
        return target

    def load_shard(self, *arguments: Any, **options: Any) -> Shard:
        shard = load_shard(*arguments, **options)
        self._left.append(weakref.ref(shard.model.module))
        return shard

    def release(self) -> None:
        """Torch gives back only what nothing holds on to."""
        assert [left() for left in self._left] == [None] * 2 * self.loads
        self._released += 1


class Asked:
    """A worker, as probes and coordinators see it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._health: Any = health_pb2_grpc.HealthStub(channel)
        self._stub: Any = verify_pb2_grpc.VerifyServiceStub(channel)

    async def health(self, service: str = "") -> int:
        """Raises where nothing answers; the first time it may still be about to listen."""
        request = health_pb2.HealthCheckRequest(service=service)
        return int((await self._health.Check(request, wait_for_ready=True)).status)

    async def incarnation(self) -> str:
        state = await self._stub.GetWorkerState(verify_pb2.GetWorkerStateRequest())
        return str(state.incarnation)

    async def refused(self) -> list[str]:
        """What is said of calls while there is no engine."""
        said = []
        for call in (self.incarnation(), self._stub.Decode(_nothing()).read()):
            with pytest.raises(grpc.RpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            said.append(str(caught.value.details()))
        return said


async def _nothing() -> AsyncIterator[verify_pb2.DecodeRequest]:
    await asyncio.Event().wait()
    yield verify_pb2.DecodeRequest()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(6000):
        if await condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came about")


async def test_it_answers_while_its_ranks_start_anew_and_ends_when_it_is_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, ranks, stop = Gate(), ForkedRanks(), asyncio.Event()
    monkeypatch.setattr(app, "load_target", gate.load)
    monkeypatch.setattr(app, "open_ranks", lambda _: ranks)
    monkeypatch.setattr(ranks_module, "load_shard", gate.load_shard)
    monkeypatch.setattr(torch.cuda, "empty_cache", gate.release)
    monkeypatch.setattr(app, "_LOADING_GRACE_S", 0.1)
    port = take_port("127.0.0.1", 0)
    with new_valkey() as valkey:
        settings = Settings(
            model=str(save_model(tmp_path)),
            redis_url=f"redis://127.0.0.1:{valkey.port}/0",
            port=port,
            forward="lean",
            kv_memory="1MiB",
            calibrate=False,
            tensor_parallel_size=2,
            rank_port=take_port("127.0.0.1", 0),
        )
        running = asyncio.create_task(VerifyWorker(settings, "v").run(stop))
        async with rpc.open_channel(f"127.0.0.1:{port}") as channel:
            worker = Asked(channel)

            async def serves() -> bool:
                assert not running.done()
                return await worker.health() == int(STATUS.SERVING)

            async def loads() -> bool:
                # Nothing in between is refused, either.
                assert await worker.health() in (STATUS.SERVING, STATUS.NOT_SERVING)
                return gate.loads == expected

            await until(serves)
            first = await worker.incarnation()
            for expected in (2, 3):
                gate.open.clear()
                victim = ranks.others[0]
                assert victim.pid is not None
                os.kill(victim.pid, signal.SIGKILL)
                await until(loads)
                assert await worker.health() == STATUS.NOT_SERVING
                # To be started again would not help it.
                assert await worker.health(rpc.LIVENESS) == STATUS.SERVING
                assert await worker.refused() == ["verify worker v loads its model"] * 2
                if expected == 2:
                    gate.open.set()
                    await until(serves)
                    assert await worker.incarnation() != first
            stop.set()
            with pytest.raises(Abandoned):
                await running
    assert all(other.exitcode is not None for other in ranks.others)
    gate.closed = True
    gate.open.set()


async def test_a_worker_that_is_stopped_while_it_loads_ends() -> None:
    port = take_port("127.0.0.1", 0)
    code = (
        "import threading\n"
        "from verify_worker import __main__, app\n"
        "from verify_worker.config import Settings\n"
        "app.load_target = lambda *_: threading.Event().wait()\n"
        "app._LOADING_GRACE_S = 0.1\n"
        f"__main__.run(Settings(model='m', redis_url='redis://127.0.0.1:9/0', port={port}))\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    try:
        async with rpc.open_channel(f"127.0.0.1:{port}") as channel:
            worker = Asked(channel)
            assert await worker.health() == STATUS.NOT_SERVING
            assert await worker.health(rpc.LIVENESS) == STATUS.NOT_SERVING
            process.terminate()
            assert await asyncio.wait_for(process.wait(), 60) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("late", [False, True])
async def test_a_worker_that_is_stopped_while_ray_starts_ends(
    monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    ranks, stop = ForkedRanks(), asyncio.Event()
    begun, go_on, closed = asyncio.Event(), threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def open_ranks(_: Settings) -> ForkedRanks:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait()
        return ranks

    monkeypatch.setattr(app, "open_ranks", open_ranks)
    monkeypatch.setattr(app, "_LOADING_GRACE_S", 0.1 if late else 60.0)
    monkeypatch.setattr(ranks, "close", closed.set)
    settings = Settings(model="m", redis_url="redis://r", tensor_parallel_size=2)
    running = asyncio.create_task(VerifyWorker(settings, "v").run(stop))
    await begun.wait()
    stop.set()
    if late:
        # It takes for ever: the process ends without it.
        with pytest.raises(Abandoned):
            await running
    go_on.set()
    if not late:
        await running
        assert closed.is_set()
