"""Sessions whose place is doubtful: another owner has it, or nobody reads what is said."""

import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import grpc
import pytest

from outrider import messages as m
from outrider.errors import FencedError
from outrider.pb.v1 import coordinator_pb2 as pb
from outrider.pb.v1 import coordinator_pb2_grpc, types_pb2
from outrider.session.records import SessionState
from tests.support.coordinator_stack import (
    EOS,
    Completion,
    FakeVerifyWorker,
    Stack,
    running_stack,
    until,
    until_async,
)

# A client that takes no more than this before it reads.
SHORT_OF_ROOM = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 64 * 1024)]


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_stack() as stack:
        yield stack


@contextmanager
def hung_redis(stack: Stack) -> Iterator[None]:
    process = stack.valkey._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


async def begin(stack: Stack, worker: FakeVerifyWorker) -> tuple[Completion, m.StartSession]:
    done = stack.generate("ab")
    start = await worker.started()
    worker.say(worker.progress(start, "x"))
    await done.shows("x")
    return done, start


@asynccontextmanager
async def unread(stack: Stack, worker: FakeVerifyWorker) -> AsyncIterator[None]:
    """A call whose client reads its first message only, with more to say than fits on the way."""
    wanted = types_pb2.LogprobOptions(top=20)
    async with grpc.aio.insecure_channel(stack.address, options=SHORT_OF_ROOM) as channel:
        client = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        call = client.Generate(pb.GenerateRequest(session_id="s", text="ab", logprobs=wanted))
        await call.read()
        start = await worker.started("s")
        large = m.TokenLogprobs(-1.0, ((1, -1.0),) * 40_000)
        for said in range(8):
            worker.say(worker.progress(start, "x", base_len=2 + said, logprobs=[large]))
        yield


async def test_a_session_that_may_be_anothers_is_left_until_redis_says_whose_it_is(
    stack: Stack,
) -> None:
    """A worker knows a higher epoch, and the former owner can't reach Redis."""
    await stack.start_coordinator(lease_s=60.0)
    worker = await stack.add_verify()
    done, start = await begin(stack, worker)
    taken = await stack.records.take_over("s", owner="c2", tenant="")
    with hung_redis(stack):
        fenced = FencedError("session s was started again with epoch 2")
        worker.say(m.SessionFailed(session_id="s", epoch=start.epoch, error=fenced))

        async def unreachable() -> bool:
            said = await stack.client.GetStatus(pb.GetStatusRequest())
            return not said.redis_reachable

        await until_async(unreachable, "Redis is missed")
        # What came before was handled in order; what comes now is of a session that has left.
        assert len(worker.of(m.StartSession)) == 1
        assert worker.of(m.CloseSession)[-1].epoch == start.epoch
        assert done.error is None
    with pytest.raises(FencedError, match="c2"):
        await done.end()
    assert len(worker.of(m.StartSession)) == 1
    assert (await stack.records.read("s"))[0].epoch == taken.record.epoch


async def test_it_goes_on_once_redis_has_said_that_it_is_its_own(stack: Stack) -> None:
    await stack.start_coordinator(lease_s=60.0)
    worker = await stack.add_verify()
    done, start = await begin(stack, worker)
    with hung_redis(stack):
        fenced = FencedError("session s is here already with epoch 7")
        worker.say(m.SessionFailed(session_id="s", epoch=start.epoch, error=fenced))
        await until(lambda: bool(worker.of(m.CloseSession)), "it has left")
    again = await worker.started(times=2)
    assert again.epoch > start.epoch + 100
    worker.say(worker.progress(again, [EOS], base_len=3))
    await done.end()
    assert (await stack.records.read("s"))[0].state is SessionState.FINISHED


async def test_a_stream_that_nobody_reads_gives_up_its_place(stack: Stack) -> None:
    await stack.start_coordinator(max_sessions=1, unread_s=3.0)
    worker = await stack.add_verify()
    async with unread(stack, worker):
        waiting = stack.request(pb.GenerateRequest(session_id="t", text="ab"))
        start = await worker.started("t")
        worker.say(worker.progress(start, [EOS]))
        await waiting.end()
    # It was paused, and can be resumed.
    assert (await stack.records.read("s"))[0].state is SessionState.PAUSED


async def test_a_cancelled_stream_that_nobody_reads_gives_up_its_place(stack: Stack) -> None:
    await stack.start_coordinator(max_sessions=1, unread_s=600.0)
    worker = await stack.add_verify()
    async with unread(stack, worker):
        assert (await stack.client.Cancel(pb.CancelRequest(session_id="s"))).cancelled
        waiting = stack.request(pb.GenerateRequest(session_id="t", text="ab"))
        start = await worker.started("t")
        worker.say(worker.progress(start, [EOS]))
        await waiting.end()
    assert (await stack.records.read("s"))[0].finish_reason is m.FinishReason.CANCELLED
