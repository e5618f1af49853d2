"""A draft worker as a process of its own, and a verify worker's side of a stream to it."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider import wire
from outrider.messages import (
    CommitDraft,
    DraftCommand,
    DraftEvent,
    DraftFailed,
    OpenDraft,
    Proposal,
    SamplingParams,
)
from outrider.pb.v1 import draft_pb2, draft_pb2_grpc
from outrider.rpc import open_channel
from outrider.session.redis import connect
from outrider.session.registry import Registry, WorkerRecord

DEADLINE_S = 60
ROOT = Path(__file__).parents[2]


@dataclass
class Worker:
    """A running draft worker."""

    process: asyncio.subprocess.Process
    record: WorkerRecord
    registry: Registry

    async def sessions(self) -> int:
        """Sessions that it says it holds; -1 when it is not in the registry."""
        for record in await self.registry.list_workers():
            if record.worker_id == self.record.worker_id:
                return record.sessions
        return -1

    async def until_draining(self, draining: bool) -> None:
        async def reached() -> bool:
            listed = await self.registry.list_workers()
            told = [r.draining for r in listed if r.worker_id == self.record.worker_id]
            return told == [draining]

        await until(reached)

    async def until_sessions(self, count: int) -> None:
        async def reached() -> bool:
            return await self.sessions() == count

        await until(reached)


async def until(check: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if await check():
                return
            await asyncio.sleep(0.05)


async def launch(redis_url: str, *flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "draft_worker", "--redis-url", redis_url, *flags),
        cwd=ROOT,
        stderr=subprocess.PIPE,
    )


async def ended(process: asyncio.subprocess.Process) -> tuple[int, str]:
    """Exit code and what it wrote."""
    async with asyncio.timeout(DEADLINE_S):
        _, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, errors.decode()


@asynccontextmanager
async def running(redis_url: str, worker_id: str, *flags: str) -> AsyncIterator[Worker]:
    process = await launch(redis_url, "--worker-id", worker_id, *flags)
    try:
        async with connect(redis_url) as redis:
            registry = Registry(redis)
            found: list[WorkerRecord] = []

            async def announced() -> bool:
                assert process.returncode is None
                workers = await registry.list_workers()
                found.extend(worker for worker in workers if worker.worker_id == worker_id)
                return bool(found)

            await until(announced)
            yield Worker(process, found[0], registry)
    finally:
        if process.returncode is None:
            process.kill()
        await ended(process)


class Peer:
    """A verify worker's side of a Speculate stream."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self.call = draft_pb2_grpc.DraftServiceStub(self._channel).Speculate()
        self._events: list[DraftEvent] = []

    async def say(self, *commands: DraftCommand) -> None:
        frame = [wire.draft_command_to_pb(command) for command in commands]
        await self.call.write(draft_pb2.SpeculateRequest(commands=frame))

    async def next(self) -> DraftEvent:
        async with asyncio.timeout(DEADLINE_S):
            while not self._events:
                frame = await self.call.read()
                assert isinstance(frame, draft_pb2.SpeculateResponse), "the stream has ended"
                self._events += [wire.draft_event_from_pb(item) for item in frame.events]
        return self._events.pop(0)

    async def close(self) -> None:
        self.call.cancel()
        await self._channel.close()


@asynccontextmanager
async def peer(worker: Worker) -> AsyncIterator[Peer]:
    made = Peer(worker.record.address)
    try:
        yield made
    finally:
        await made.close()


async def health(address: str) -> health_pb2.HealthCheckResponse.ServingStatus:
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="outrider.v1.DraftService")
        status: health_pb2.HealthCheckResponse.ServingStatus = (await stub.Check(request)).status
        return status


def opened(session_id: str, *token_ids: int) -> OpenDraft:
    return OpenDraft(
        session_id=session_id,
        epoch=1,
        token_ids=token_ids,
        sampling=SamplingParams(),
        draft_len=3,
    )


def committed(session_id: str, base_len: int, *token_ids: int) -> CommitDraft:
    return CommitDraft(
        session_id=session_id, epoch=1, base_len=base_len, token_ids=token_ids, draft_len=3
    )


def drafted(event: DraftEvent) -> tuple[str, int, tuple[int, ...]]:
    assert isinstance(event, Proposal), event
    return event.session_id, event.base_len, event.draft.token_ids


def reason(event: DraftEvent) -> str:
    assert isinstance(event, DraftFailed), event
    return event.error.reason
