"""Draining workers: who is told, what moves, what stays, over scripted verify workers."""

from collections.abc import AsyncIterator

import grpc
import pytest

from coordinator import draining
from outrider import messages as m
from outrider import rpc
from outrider.errors import NotFoundError, UnavailableError
from outrider.pb.v1 import coordinator_pb2 as pb
from outrider.session.registry import Pool
from tests.support.coordinator_stack import (
    EOS,
    Completion,
    FakeVerifyWorker,
    Stack,
    running_stack,
    token_ids,
    until,
    until_async,
)


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_stack() as stack:
        yield stack


async def begin(stack: Stack, worker: FakeVerifyWorker, session_id: str = "s") -> Completion:
    """A session with one token on the worker."""
    done = stack.generate("ab", session_id=session_id, max_tokens=9)
    worker.say(worker.progress(await worker.started(session_id), "x"))
    await until(lambda: done.text == "x", "the first token")
    return done


async def drain(stack: Stack, worker_id: str, *, on: bool = True) -> int:
    request = pb.DrainWorkerRequest(worker_id=worker_id, draining=on)
    with rpc.status_as_errors("the coordinator"):
        return (await stack.client.DrainWorker(request)).sessions


async def left(stack: Stack, worker_id: str) -> int:
    status = await stack.client.GetStatus(pb.GetStatusRequest())
    return next(w.sessions for w in status.workers if w.worker_id == worker_id)


async def finish(worker: FakeVerifyWorker, start: m.StartSession, done: Completion) -> None:
    worker.say(worker.progress(start, [*token_ids("yz"), EOS]))
    await done.end()
    assert done.text == "xyz"


async def test_sessions_leave_a_worker_that_is_told_to_drain(stack: Stack) -> None:
    await stack.start_coordinator()
    first = await stack.add_verify("v1")
    await stack.ready()
    done = await begin(stack, first)
    second = await stack.add_verify("v2")
    await stack.ready()
    assert await drain(stack, "v1") <= 1  # it may have moved by then
    start = await second.started()
    assert (start.epoch, list(start.token_ids)) == (2, token_ids("abx"))
    assert (await first.closed()).epoch == 1
    # What the old one still says is of another epoch.
    first.say(first.progress(start, "no", epoch=1))
    await finish(second, start, done)
    assert await drain(stack, "v1") == 0
    # It gets nothing new, and what is told it again is no failure.
    stack.generate(session_id="t")
    await second.started("t")
    assert await drain(stack, "v1", on=False) == 0
    stack.announced["v2"] = stack.record(
        stack.announced["v2"].pool, "v2", address=stack.announced["v2"].address, draining=True
    )
    await first.started("t")


async def test_a_heartbeat_that_says_so_is_enough(stack: Stack) -> None:
    await stack.start_coordinator()
    first = await stack.add_verify("v1")
    await stack.ready()
    done = await begin(stack, first)
    second = await stack.add_verify("v2")
    first.heartbeat = m.Heartbeat(0, True)
    await finish(second, await second.started(), done)


async def test_what_nobody_else_can_take_finishes_where_it_is(stack: Stack) -> None:
    await stack.start_coordinator()
    first = await stack.add_verify("v1")
    await stack.ready()
    done = await begin(stack, first)
    assert await drain(stack, "v1") == 1
    start = await first.started()
    first.say(first.progress(start, "y", base_len=3))
    await done.shows("xy")
    first.say(first.progress(start, [*token_ids("z"), EOS], base_len=4))
    await done.end()
    assert (done.text, len(first.of(m.StartSession))) == ("xyz", 1)
    assert await drain(stack, "v1") == 0


async def test_no_more_sessions_move_than_there_is_room_for(stack: Stack) -> None:
    await stack.start_coordinator()
    first = await stack.add_verify("v1")
    await stack.ready()
    names = ("a", "b", "c")
    for name in names:
        await begin(stack, first, name)
    second = await stack.add_verify("v2", capacity=2)
    await stack.ready()
    await drain(stack, "v1")

    async def two_moved() -> bool:
        return await left(stack, "v2") == 2

    await until_async(two_moved, "two of the three moved")
    await stack.coordinator._look()
    assert await left(stack, "v1") == 1
    (stays,) = (name for name in names if not second.of(m.StartSession, name))
    assert first.of(m.CloseSession, stays) == []


async def test_a_worker_that_is_not_there(stack: Stack) -> None:
    await stack.start_coordinator()
    await stack.add_verify("v1")
    stack.add_draft("d1")
    await stack.ready()
    with pytest.raises(NotFoundError, match="no worker 'v9' is up; there are: d1, v1"):
        await drain(stack, "v9")
    assert await drain(stack, "d1") == 0
    assert stack.announced["d1"].draining


async def test_a_worker_that_does_not_obey(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "OBEY_S", 0.3)
    await stack.start_coordinator()
    await stack.registry.announce(stack.record(Pool.DRAFT, "mute", address="nowhere:1"))
    with pytest.raises(UnavailableError, match="'mute' was told, and has not obeyed"):
        await drain(stack, "mute")


async def test_without_redis_nobody_can_be_told(stack: Stack) -> None:
    await stack.start_coordinator()
    await stack.add_verify("v1")
    await stack.ready()
    stack.valkey.stop()
    with pytest.raises(UnavailableError, match="Redis"):
        await drain(stack, "v1")
    with pytest.raises(grpc.RpcError):
        await stack.client.DrainWorker(pb.DrainWorkerRequest(worker_id="v1", draining=True))
