"""A link against a real server that notes frames."""

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest

from coordinator import decode_link
from coordinator.decode_link import DecodeLink, LinkLost
from outrider import messages as m
from outrider import rpc
from outrider.pb.v1 import verify_pb2, verify_pb2_grpc
from outrider.session.registry import Pool, WorkerRecord


class Server(verify_pb2_grpc.VerifyServiceServicer):
    def __init__(self) -> None:
        self.frames: list[verify_pb2.DecodeRequest] = []
        self.open = asyncio.Event()
        self.outbox: asyncio.Queue[verify_pb2.DecodeResponse | None] = asyncio.Queue()

    async def Decode(self, requests: Any, context: Any) -> None:  # noqa: N802 - the rpc's name
        reading = asyncio.create_task(self._read(requests))
        self.open.set()
        while (frame := await self.outbox.get()) is not None:
            await context.write(frame)
        reading.cancel()
        await asyncio.wait([reading])

    async def _read(self, requests: Any) -> None:
        async for frame in requests:
            self.frames.append(frame)

    async def commands(self, count: int) -> list[list[str]]:
        """The session ids of each frame, once `count` commands have come."""
        for _ in range(2000):
            ids = [[command.session_id for command in frame.commands] for frame in self.frames]
            if sum(map(len, ids)) >= count:
                return ids
            await asyncio.sleep(0.01)
        raise AssertionError(ids)


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, str]]:
    servicer, grpc_server = Server(), rpc.Server()
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(servicer, grpc_server.grpc)
    port = await grpc_server.start("outrider.v1.VerifyService", "127.0.0.1", 0)
    yield servicer, f"127.0.0.1:{port}"
    await grpc_server.stop(0)


def record(address: str) -> WorkerRecord:
    return WorkerRecord(Pool.VERIFY, "v1", address, "i1", "m", "f", "", 8, 0, False, 64)


async def opened(address: str) -> DecodeLink:
    changed = asyncio.Event()
    link = DecodeLink(record(address), changed.set)
    await changed.wait()
    return link


def close(session_id: str) -> m.CloseSession:
    return m.CloseSession(session_id=session_id, epoch=1)


async def test_commands_that_wait_share_a_frame(
    server: tuple[Server, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    servicer, address = server
    link = await opened(address)
    assert link.connected
    for i in range(5):
        link.send(close(f"s{i}"))
    assert await servicer.commands(5) == [["s0", "s1", "s2", "s3", "s4"]]
    monkeypatch.setattr(decode_link, "FRAME_BYTES", 12)
    for i in range(3):
        link.send(close(f"t{i}"))
    assert (await servicer.commands(8))[1:] == [["t0", "t1"], ["t2"]]
    await link.close()


async def test_events_reach_their_session_and_the_end_reaches_all(
    server: tuple[Server, str],
) -> None:
    servicer, address = server
    link = await opened(address)
    inboxes: dict[str, asyncio.Queue[Any]] = {name: asyncio.Queue() for name in "abc"}
    for name, inbox in inboxes.items():
        link.attach(name, inbox.put_nowait)
    link.detach("c")
    assert link.sessions == 2
    events = [verify_pb2.DecodeEvent(session_id=name, epoch=1) for name in "cba"]
    for event in events:
        event.ended.reason = 1
    events[1].ClearField("ended")  # malformed: its session alone is given up
    servicer.outbox.put_nowait(verify_pb2.DecodeResponse(events=events))
    ended = m.SessionEnded(session_id="a", epoch=1, reason=m.FinishReason.STOP)
    assert await inboxes["a"].get() == ended
    lost = await inboxes["b"].get()
    assert lost == LinkLost(link, lost.why)
    assert "malformed" in lost.why
    servicer.outbox.put_nowait(None)
    for name in "ab":
        assert (await inboxes[name].get()).link is link
    assert inboxes["c"].empty()
    assert not link.connected


async def test_a_worker_that_is_not_there() -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
    for _ in range(5):
        link = await opened("127.0.0.1:1")
        assert not link.connected
        await link.close()
        assert link.closed
    gc.collect()
    await asyncio.sleep(0.1)
    assert complaints == []
