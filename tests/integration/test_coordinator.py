"""The coordinator in its own process space: real gRPC, real Valkey, scripted verify workers."""

import asyncio
import math
from collections.abc import AsyncIterator

import grpc
import pytest

from outrider import messages as m
from outrider.errors import (
    InternalError,
    InvalidRequestError,
    NoVerifyWorkerError,
    NumericsError,
    OverloadedError,
    SessionExistsError,
    UnavailableError,
    UnknownModelError,
    UnknownSessionError,
)
from outrider.pb.v1 import coordinator_pb2 as pb
from outrider.pb.v1 import types_pb2
from outrider.rpc import error_of
from outrider.session.records import SessionState
from tests.support.coordinator_stack import EOS, Stack, running_stack, token_ids, until_async


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_stack() as stack:
        yield stack


async def test_streams_a_completion_and_records_it(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    draft = stack.add_draft("d1")
    await stack.ready()
    done = stack.generate(
        "ab", seed=2**64 - 1, temperature=0.5, top_k=7, top_p=0.9, stop=["!"], stop_token_ids=[9]
    )
    start = await worker.started()
    assert start == m.StartSession(
        session_id="s",
        epoch=1,
        token_ids=tuple(token_ids("ab")),
        prompt_len=2,
        sampling=m.SamplingParams(0.5, 7, 0.9, 2**64 - 1),
        endings=m.Endings(62, frozenset({EOS, 9})),
        speculation=m.SpeculationOptions(),
        drafter=m.DraftWorkerRef("d1", draft.address),
    )
    worker.say(worker.progress(start, "x", cached_tokens=1))
    await done.shows("x")
    running, log = await stack.records.read("s")
    assert (running.state, running.epoch) == (SessionState.RUNNING, 1)
    assert (running.verify_worker_id, running.draft_worker_id) == ("v1", "d1")
    assert log == token_ids("abx")
    worker.say(worker.progress(start, "yz!w", base_len=3, draft_tokens=3))
    finished = await done.end()
    assert done.text == "xyz"
    assert done.token_ids == token_ids("xyz!")
    assert finished.reason == types_pb2.FINISH_REASON_STOP
    # What the first round said counts.
    assert finished.usage == pb.Usage(prompt_tokens=2, completion_tokens=4, cached_tokens=1)
    assert finished.speculation == types_pb2.SpeculationFigures(
        rounds=2, drafts=1, draft_tokens=3, accepted_tokens=3, accepted_per_position=[1, 1, 1]
    )
    assert 0 < finished.timings.first_token_us <= finished.timings.total_us
    assert done.started == pb.Started(
        session_id="s", model="bytes", seed=2**64 - 1, prompt_tokens=2
    )
    # The worker did not know the stop string, so it was told to end.
    assert (await worker.closed()).epoch == 1
    record, log = await stack.records.read("s")
    assert (record.state, record.finish_reason) == (SessionState.FINISHED, m.FinishReason.STOP)
    assert log == token_ids("abxyz!")
    status = await stack.client.GetStatus(pb.GetStatusRequest())
    assert (status.running_sessions, status.finished_sessions) == (0, 1)
    assert status.completion_tokens == 4
    assert status.speculation == finished.speculation
    assert {worker.sessions for worker in status.workers} == {0}


async def test_defaults_and_eos(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    done = stack.generate("ab", session_id="")
    await asyncio.wait_for(done.begun.wait(), 30)
    assert done.started is not None
    start = await worker.started(done.started.session_id)
    assert start.sampling == m.SamplingParams(seed=done.started.seed)
    assert start.drafter is None
    worker.say(
        worker.progress(start, [*token_ids("q"), EOS]),
        m.SessionEnded(session_id=start.session_id, epoch=start.epoch, reason=m.FinishReason.STOP),
    )
    assert (await done.end()).reason == types_pb2.FINISH_REASON_STOP
    assert (done.text, done.token_ids) == ("q", [*token_ids("q"), EOS])


async def test_sessions_do_not_mix(stack: Stack) -> None:
    await stack.start_coordinator()
    workers = [await stack.add_verify("v1"), await stack.add_verify("v2")]
    await stack.ready()
    prompts = {f"s{i}": chr(ord("a") + i) for i in range(6)}
    done = {sid: stack.generate(text, session_id=sid) for sid, text in prompts.items()}
    await until_async(lambda: started_everywhere(workers, 6), "six sessions placed")
    assert [len(worker.commands) for worker in workers] == [3, 3]
    for step in range(4):
        for worker in workers:
            starts = [c for c in worker.commands if isinstance(c, m.StartSession)]
            events = [
                worker.progress(start, prompts[start.session_id].upper(), base_len=1 + step)
                for start in starts
            ]
            worker.say(*events)
    for sid, text in prompts.items():
        await done[sid].shows(text.upper() * 4)


async def started_everywhere(workers: list, count: int) -> bool:  # type: ignore[type-arg]
    return sum(len(worker.commands) for worker in workers) == count


async def test_a_client_that_goes_frees_the_worker_and_pauses_its_session(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    done = stack.generate()
    start = await worker.started()
    worker.say(worker.progress(start, "x"))
    await done.shows("x")
    await done.cancel()
    await worker.closed()

    async def recorded() -> bool:
        record, _ = await stack.records.read("s")
        return record.state is SessionState.PAUSED

    await until_async(recorded, "the record is paused")
    info = (await stack.client.GetSession(pb.GetSessionRequest(session_id="s"))).session
    assert info.state == pb.SESSION_STATE_PAUSED
    assert info.token_ids == token_ids("x")
    status = await stack.client.GetStatus(pb.GetStatusRequest())
    assert status.running_sessions == 0


async def test_deadline_ends_the_work(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    await stack.ready()
    call = stack.client.Generate(pb.GenerateRequest(session_id="s", text="ab"), timeout=1.0)
    with pytest.raises(grpc.RpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await worker.closed()


async def test_cancel_rpc(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    done = stack.generate(stop=["xyz"])
    start = await worker.started()
    worker.say(worker.progress(start, "x"))
    await until_async(lambda: logged(stack, "abx"), "the token is logged")
    reply = await stack.client.Cancel(pb.CancelRequest(session_id="s"))
    assert reply.cancelled
    finished = await done.end()
    assert finished.reason == types_pb2.FINISH_REASON_CANCELLED
    assert done.text == "x"  # it was held back, as it might have become a stop string
    await worker.closed()
    record, _ = await stack.records.read("s")
    assert record.finish_reason is m.FinishReason.CANCELLED
    assert not (await stack.client.Cancel(pb.CancelRequest(session_id="s"))).cancelled
    with pytest.raises(grpc.RpcError) as caught:
        await stack.client.Cancel(pb.CancelRequest(session_id="other"))
    assert isinstance(error_of(caught.value, ""), UnknownSessionError)


async def logged(stack: Stack, text: str) -> bool:
    return (await stack.records.read("s"))[1] == token_ids(text)


async def test_get_session_while_it_runs_and_after(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    done = stack.generate("ab", max_tokens=2)
    start = await worker.started()
    assert start.endings.max_new_tokens == 2
    worker.say(worker.progress(start, "x"))
    await done.shows("x")
    info = (await stack.client.GetSession(pb.GetSessionRequest(session_id="s"))).session
    expected = pb.SessionInfo(
        session_id="s",
        model="bytes",
        state=pb.SESSION_STATE_RUNNING,
        epoch=1,
        prompt_tokens=2,
        token_ids=token_ids("x"),
        verify_worker_id="v1",
    )
    assert info == expected
    worker.say(worker.progress(start, "y", base_len=3))
    assert (await done.end()).reason == types_pb2.FINISH_REASON_LENGTH
    info = (await stack.client.GetSession(pb.GetSessionRequest(session_id="s"))).session
    expected.state = pb.SESSION_STATE_FINISHED
    expected.finish_reason = types_pb2.FINISH_REASON_LENGTH
    expected.token_ids[:] = token_ids("xy")
    assert info == expected


async def test_models(stack: Stack) -> None:
    await stack.start_coordinator()
    reply = await stack.client.ListModels(pb.ListModelsRequest())
    assert list(reply.models) == [
        pb.ModelInfo(name="bytes", fingerprint="target-1", context_len=64)
    ]


@pytest.mark.parametrize(
    ("fields", "kind", "said"),
    [
        ({"model": "gpt-9"}, UnknownModelError, "'gpt-9'.*served: 'bytes'"),
        ({"temperature": -0.1}, InvalidRequestError, "temperature"),
        ({"temperature": math.inf}, InvalidRequestError, "temperature"),
        ({"temperature": math.nan}, InvalidRequestError, "temperature"),
        ({"top_p": 0.0}, InvalidRequestError, "top_p"),
        ({"top_p": 1.5}, InvalidRequestError, "top_p"),
        ({"max_tokens": 0}, InvalidRequestError, "max_tokens"),
        ({"stop": [""]}, InvalidRequestError, "stop string"),
        ({"stop": [str(i) for i in range(17)]}, InvalidRequestError, "at most 16"),
        ({"stop_token_ids": [300]}, InvalidRequestError, "300 is not within.* 257 tokens"),
        ({"stop_token_ids": [257]}, InvalidRequestError, "stop_token_ids: 257 is not within"),
        ({"token_ids": types_pb2.TokenIds(ids=[1, 301])}, InvalidRequestError, "301"),
        ({"token_ids": types_pb2.TokenIds(ids=[1, 257])}, InvalidRequestError, "257 is not within"),
        ({"token_ids": types_pb2.TokenIds()}, InvalidRequestError, "empty"),
        ({"text": ""}, InvalidRequestError, "empty"),
        ({"text": "x" * 64}, InvalidRequestError, "has 64 tokens, and bytes takes 64"),
        ({"text": "x" * 9000}, InvalidRequestError, "has 9000 tokens"),
        ({"messages": pb.Messages()}, InvalidRequestError, "messages"),
        (
            {"messages": pb.Messages(messages=[pb.ChatMessage(role="user", content="x")])},
            InvalidRequestError,
            "no chat template",
        ),
        ({"session_id": "a b"}, InvalidRequestError, "session_id"),
        ({"session_id": "x" * 129}, InvalidRequestError, "session_id"),
        ({}, InvalidRequestError, "a prompt is needed"),
    ],
)
async def test_what_is_refused(
    stack: Stack, fields: dict[str, object], kind: type[Exception], said: str
) -> None:
    await stack.start_coordinator()
    prompts = {"text", "token_ids", "messages"} & fields.keys()
    text = {} if prompts or not fields else {"text": "ab"}
    done = stack.request(pb.GenerateRequest(**{**text, **fields}))
    with pytest.raises(kind, match=said):
        await done.end()


async def test_longest_prompt_has_room_for_one_token(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    done = stack.generate("x" * 63)
    start = await worker.started()
    assert start.endings.max_new_tokens == 1
    worker.say(worker.progress(start, "yz"))
    assert (await done.end()).reason == types_pb2.FINISH_REASON_LENGTH
    assert done.text == "y"


async def test_two_requests_with_one_id(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    first, second = stack.generate("ab"), stack.generate("cd")
    start = await worker.started()
    ours, other = (first, second) if start.token_ids == tuple(token_ids("ab")) else (second, first)
    with pytest.raises(SessionExistsError, match="'s'"):
        await other.end()
    worker.say(worker.progress(start, "x"))
    await ours.shows("x")
    assert len(worker.of(m.StartSession)) == 1


async def test_one_failed_session_leaves_the_others_alone(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    good, bad = stack.generate(session_id="good"), stack.generate(session_id="bad")
    start, poison = await worker.started("good"), await worker.started("bad")
    failed = m.SessionFailed(session_id="bad", epoch=poison.epoch, error=NumericsError("NaN"))
    worker.say(failed, worker.progress(start, "x"))
    with pytest.raises(NumericsError, match="NaN"):
        await bad.end()
    await good.shows("x")
    record, _ = await stack.records.read("bad")
    assert record.finish_reason is m.FinishReason.ERROR


async def test_without_a_verify_worker(stack: Stack) -> None:
    await stack.start_coordinator(place_wait_s=0.2)
    await stack.add_verify("v9", model_fingerprint="another", model="another")
    with pytest.raises(NoVerifyWorkerError, match="outrider verify-worker"):
        await stack.generate().end()
    # Trying again later may well succeed.
    record, _ = await stack.records.read("s")
    assert record.state is SessionState.PAUSED


async def test_waits_for_a_verify_worker(stack: Stack) -> None:
    await stack.start_coordinator()
    done = stack.generate()
    await until_async(lambda: logged_any(stack), "the record is there")
    worker = await stack.add_verify()
    start = await worker.started()
    worker.say(worker.progress(start, "x"))
    await done.shows("x")


async def logged_any(stack: Stack) -> bool:
    return await stack.records.position("s") is not None


async def test_full_workers(stack: Stack) -> None:
    await stack.start_coordinator(max_queued=0)
    worker = await stack.add_verify(capacity=1)
    stack.generate(session_id="first")
    await worker.started("first")
    with pytest.raises(OverloadedError, match="full"):
        await stack.generate(session_id="second").end()


async def test_a_worker_that_refuses_is_not_asked_again(stack: Stack) -> None:
    await stack.start_coordinator(replace_wait_s=0.2)
    workers = [await stack.add_verify("v1"), await stack.add_verify("v2")]
    await stack.ready()
    done = stack.generate()
    for worker, epoch in zip(workers, (1, 2), strict=True):
        start = await worker.started()
        assert start.epoch == epoch
        worker.say(m.SessionFailed(session_id="s", epoch=epoch, error=OverloadedError("full")))
    with pytest.raises(OverloadedError, match="all 2 verify workers"):
        await done.end()


async def test_stopping_refuses_new_sessions_and_ends_running_ones(stack: Stack) -> None:
    coordinator = await stack.start_coordinator(drain_timeout_s=0.5)
    worker = await stack.add_verify()
    quick, slow = stack.generate(session_id="quick"), stack.generate(session_id="slow")
    start, _ = await worker.started("quick"), await worker.started("slow")
    stopping = asyncio.create_task(coordinator._sessions.drain(0.5))
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError, match="stopping"):
        await stack.generate(session_id="late").end()
    worker.say(worker.progress(start, [EOS]))
    assert (await quick.end()).reason == types_pb2.FINISH_REASON_STOP
    with pytest.raises(UnavailableError, match="stopping"):
        await slow.end()
    await stopping
    await worker.closed("slow")


async def test_a_fault_of_the_coordinator_has_a_status(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = await stack.start_coordinator()
    monkeypatch.setattr(coordinator._sessions, "find", None)
    with pytest.raises(grpc.RpcError) as caught:
        await stack.client.GetSession(pb.GetSessionRequest(session_id="s"))
    assert isinstance(error_of(caught.value, ""), InternalError)
