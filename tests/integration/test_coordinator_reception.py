"""Who is let in for how much: the same request again, what is resumed, what is only read."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from outrider.errors import FencedError, SessionExistsError, UnknownSessionError
from outrider.messages import FinishReason
from outrider.pb.v1 import coordinator_pb2 as pb
from outrider.pb.v1 import types_pb2
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

KEYED: dict[str, Any] = {"session_id": "s", "text": "ab", "idempotency_key": "k"}


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_stack() as stack:
        yield stack


async def begin(stack: Stack, worker: FakeVerifyWorker, session_id: str, n: int = 1) -> Completion:
    """A request of which all sessions are placed."""
    done = stack.generate("ab", session_id=session_id, n=n)
    await worker.started(f"{session_id}.{n - 1}" if n > 1 else session_id)
    await until(done.begun.is_set, "it has begun")
    return done


async def leave(stack: Stack, done: Completion) -> None:
    """The client of the only request goes."""
    await done.cancel()
    await until(lambda: admission(stack).running == 0, "nothing runs")


def admission(stack: Stack) -> Any:
    return stack.coordinator._admission


async def finish(worker: FakeVerifyWorker, session_id: str, times: int = 1) -> None:
    start = await worker.started(session_id, times)
    worker.say(worker.progress(start, [*token_ids("x"), EOS]))


async def test_what_is_resumed_counts_as_often_as_it_runs_not_as_its_client_says(
    stack: Stack,
) -> None:
    await stack.start_coordinator(max_sessions=4)
    worker = await stack.add_verify()
    await stack.ready()
    await leave(stack, await begin(stack, worker, "s", n=4))
    other = await begin(stack, worker, "t", n=3)
    rest = stack.resume()  # says nothing of its four samples
    await until(lambda: admission(stack).queued == 1, "it waits")
    assert admission(stack).running == 3
    await other.cancel()
    await until(rest.begun.is_set, "it is let in")
    assert admission(stack).running == len(stack.coordinator._sessions.running) == 4


async def test_many_offsets_take_no_places_from_others(stack: Stack) -> None:
    await stack.start_coordinator(max_queued=0, tenant_sessions=2)
    worker = await stack.add_verify(capacity=2)
    await stack.ready()
    await leave(stack, await begin(stack, worker, "s"))
    rest = stack.resume(*[0] * 16)
    await until(rest.begun.is_set, "it is let in")
    assert admission(stack).running == 1
    other = stack.request(pb.GenerateRequest(session_id="b", text="ab"), tenant="other")
    await finish(worker, "b")
    await other.end()


async def test_another_tenant_gets_no_place_by_the_id_of_what_runs(stack: Stack) -> None:
    await stack.start_coordinator(max_sessions=1)
    worker = await stack.add_verify()
    await stack.ready()
    done = await begin(stack, worker, "s")
    with pytest.raises(UnknownSessionError):
        await stack.resume(tenant="eve").end()
    assert admission(stack).running == 1
    await finish(worker, "s")
    await done.end()


async def test_the_same_request_again_does_not_wait_for_itself(stack: Stack) -> None:
    await stack.start_coordinator(max_sessions=1, max_queued=0)
    worker = await stack.add_verify()
    await stack.ready()
    first = stack.request(pb.GenerateRequest(**KEYED))
    await worker.started()
    second = stack.request(pb.GenerateRequest(**KEYED))
    with pytest.raises(FencedError, match="resumed by another call"):
        await first.end()
    await finish(worker, "s", times=2)
    await second.end()
    assert second.text == "x"
    await until(lambda: admission(stack).running == 0, "the places of both are free")


async def test_the_same_request_again_takes_the_place_of_one_that_waits(stack: Stack) -> None:
    await stack.start_coordinator(max_sessions=1, max_queued=1)
    worker = await stack.add_verify()
    await stack.ready()
    other = await begin(stack, worker, "other")
    first = stack.request(pb.GenerateRequest(**KEYED))
    await until(lambda: admission(stack).queued == 1, "the first waits")
    # The queue is full of nothing but the first one.
    second = stack.request(pb.GenerateRequest(**KEYED))
    with pytest.raises(FencedError, match="resumed by another call"):
        await first.end()
    await until(lambda: admission(stack).queued == 1, "the second waits")
    await finish(worker, "other")
    await other.end()
    await finish(worker, "s")
    await second.end()
    assert second.text == "x"


async def test_what_another_call_was_about_to_begin_is_begun(stack: Stack) -> None:
    """The first call is in the middle of its record, and goes before that is written."""
    await stack.start_coordinator()
    worker = await stack.add_verify()
    await stack.ready()
    claims = stack.coordinator._sessions.claims
    async with stack.coordinator._services.writer._turn:  # as if Redis took its time
        first = stack.request(pb.GenerateRequest(**KEYED))
        await until(lambda: len(claims) == 1, "the first is there")
        former = claims.of("s", "")
        second = stack.request(pb.GenerateRequest(**KEYED))
        await until(lambda: claims.of("s", "") is not former, "the second is there")
        await first.cancel()
    await finish(worker, "s")
    await second.end()
    assert second.text == "x"


async def test_what_can_never_run_at_once_runs_as_far_as_there_is_room(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify("v1", capacity=4)
    await stack.ready()
    await leave(stack, await begin(stack, worker, "s", n=4))
    await stack.withdraw("v1")
    worker.end_stream()
    small = await stack.add_verify("v2", capacity=2)
    await until(lambda: stack.coordinator._pool.room == 2, "there is room for two")
    other = await begin(stack, small, "other")
    rest = stack.resume()
    await until(lambda: admission(stack).queued == 1, "it waits")
    await finish(small, "other")
    await other.end()
    for name in ("s", "s.1"):
        await small.started(name)
    await until(rest.begun.is_set, "it is let in")
    assert admission(stack).running == 2
    assert not [c for c in small.commands if c.session_id in ("s.2", "s.3")]
    for name in ("s.1", "s", "s.3", "s.2"):
        await finish(small, name)
    await rest.end()
    assert {index: sample.text for index, sample in rest.samples.items()} == dict.fromkeys(
        range(4), "x"
    )


async def test_what_has_finished_is_read_without_a_place(stack: Stack) -> None:
    await stack.start_coordinator(max_sessions=2, max_queued=0)
    worker = await stack.add_verify()
    await stack.ready()
    one = await begin(stack, worker, "one")
    await finish(worker, "one")
    await one.end()
    done = await begin(stack, worker, "s", n=2)
    await finish(worker, "s.1")
    await until(lambda: done.samples[1].finished is not None, "one of two has ended")
    await leave(stack, done)
    other = await begin(stack, worker, "other")
    rest = stack.resume()  # needs one place, for the other of the two
    await worker.started("s", 2)
    assert admission(stack).running == 2
    again = stack.resume(session_id="one")
    await again.end()
    assert again.text == "x"
    await finish(worker, "other")
    await finish(worker, "s", times=2)
    await other.end()
    await rest.end()
    assert (rest.samples[0].text, rest.samples[1].text) == ("x", "x")


async def test_cancel_reaches_what_waits_to_be_resumed(stack: Stack) -> None:
    await stack.start_coordinator(max_sessions=1)
    worker = await stack.add_verify()
    await stack.ready()
    await leave(stack, await begin(stack, worker, "s"))
    other = await begin(stack, worker, "other")
    rest = stack.resume()
    await until(lambda: admission(stack).queued == 1, "it waits")
    assert (await stack.client.Cancel(pb.CancelRequest(session_id="s"))).cancelled
    record, _ = await stack.records.read("s")
    assert record.finish_reason is FinishReason.CANCELLED
    await finish(worker, "other")
    await other.end()
    assert (await rest.end()).reason == types_pb2.FINISH_REASON_CANCELLED


async def test_what_outlived_an_earlier_request_with_the_id_is_nobody_s_sample(
    stack: Stack,
) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    await leave(stack, await begin(stack, worker, "s", n=2))

    async def known() -> bool:
        return await stack.records.count_unfinished(["s"]) == 0

    await stack.client.Cancel(pb.CancelRequest(session_id="s"))
    await until_async(known, "it is cancelled")
    await stack.redis.command("DEL", "outrider:{s}:session", "outrider:{s}:tokens")
    with pytest.raises(SessionExistsError, match=r"'s\.1'"):
        await stack.request(pb.GenerateRequest(**KEYED, n=2)).end()
