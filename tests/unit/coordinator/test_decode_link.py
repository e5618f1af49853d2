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
from outrider.clock import AwakeClock
from outrider.pb.v1 import verify_pb2, verify_pb2_grpc
from outrider.session.registry import Pool, WorkerRecord


class Server(verify_pb2_grpc.VerifyServiceServicer):
    def __init__(self) -> None:
        self.frames: list[verify_pb2.DecodeRequest] = []
        self.open = asyncio.Event()
        self.first = verify_pb2.Heartbeat()
        self.outbox: asyncio.Queue[verify_pb2.DecodeResponse | None] = asyncio.Queue()

    async def Decode(self, requests: Any, context: Any) -> None:  # noqa: N802 - the rpc's name
        reading = asyncio.create_task(self._read(requests))
        self.open.set()
        await context.write(verify_pb2.DecodeResponse(heartbeat=self.first))
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


async def opened(address: str, silence_s: float = 30.0) -> DecodeLink:
    changed = asyncio.Event()
    link = DecodeLink(record(address), changed.set, silence_s)
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


async def test_a_silent_worker_is_given_up(server: tuple[Server, str]) -> None:
    link = await opened(server[1], silence_s=0.5)
    inbox: asyncio.Queue[Any] = asyncio.Queue()
    link.attach("a", inbox.put_nowait)
    async with asyncio.timeout(30):
        lost = await inbox.get()
    assert lost.link is link
    assert "said nothing" in lost.why
    assert not link.connected


async def test_heartbeats_keep_a_link_on_which_nothing_happens(server: tuple[Server, str]) -> None:
    servicer, address = server
    link = await opened(address, silence_s=2.0)
    heard = 0.0
    # Silence is counted, and every heartbeat ends it, well beyond the limit.
    for _ in range(40):
        heard = max(heard, link.silent_s)
        servicer.outbox.put_nowait(verify_pb2.DecodeResponse(heartbeat=verify_pb2.Heartbeat()))
        await asyncio.sleep(0.1)
    assert heard > 0.0
    assert link.connected
    await link.close()


async def test_a_worker_whose_engine_hangs_is_given_up(server: tuple[Server, str]) -> None:
    servicer, address = server
    link = await opened(address)
    inbox: asyncio.Queue[Any] = asyncio.Queue()
    link.attach("a", inbox.put_nowait)
    for silent_ms in (29_999, 30_000):
        heartbeat = verify_pb2.Heartbeat(silent_ms=silent_ms)
        servicer.outbox.put_nowait(verify_pb2.DecodeResponse(heartbeat=heartbeat))
    async with asyncio.timeout(30):
        lost = await inbox.get()
    assert "hangs: it is overdue by 30.0 s" in lost.why
    assert not link.connected


async def test_a_worker_that_hangs_from_the_beginning_is_not_connected_before_it_works(
    server: tuple[Server, str],
) -> None:
    servicer, address = server
    servicer.first = verify_pb2.Heartbeat(silent_ms=60_000)
    changed = asyncio.Event()
    link = DecodeLink(record(address), changed.set, 30.0)
    await servicer.open.wait()
    heartbeat = verify_pb2.Heartbeat(silent_ms=70_000, draining=True)
    servicer.outbox.put_nowait(verify_pb2.DecodeResponse(heartbeat=heartbeat))
    await changed.wait()
    assert (link.connected, link.draining) == (False, True)
    changed.clear()
    servicer.outbox.put_nowait(verify_pb2.DecodeResponse(heartbeat=verify_pb2.Heartbeat()))
    await changed.wait()
    assert (link.connected, link.draining) == (True, False)
    await link.close()


async def test_the_time_for_which_this_process_stood_still_is_nobodys_silence(
    server: tuple[Server, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(decode_link, "AwakeClock", lambda tick_s: AwakeClock(tick_s, lambda: now))
    link = await opened(server[1], silence_s=10.0)
    now += 3600.0
    assert 0.0 < link.silent_s < 10.0
    now += 5.0
    assert 0.0 < link.silent_s < 10.0
    assert link.connected
    await link.close()
