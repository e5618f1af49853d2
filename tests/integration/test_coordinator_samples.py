"""Several samples of one prompt: ids, seeds, order, cancel, failure."""

from collections.abc import AsyncIterator

import pytest

from outrider import messages as m
from outrider.errors import (
    InvalidRequestError,
    NumericsError,
    OverloadedError,
)
from outrider.pb.v1 import coordinator_pb2 as pb
from outrider.pb.v1 import types_pb2
from outrider.sampling.seeds import derived_seed
from outrider.session.records import SessionState
from tests.support.coordinator_stack import (
    EOS,
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


async def starts_of(worker: FakeVerifyWorker, n: int) -> list[m.StartSession]:
    names = ["s", *(f"s.{index}" for index in range(1, n))]
    return [await worker.started(name) for name in names]


async def reason_of(stack: Stack, session_id: str) -> m.FinishReason | None:
    return (await stack.records.read(session_id))[0].finish_reason


async def test_each_sample_is_a_session_with_a_seed_of_its_own(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    done = stack.generate("ab", n=3, temperature=1.0, seed=7, logprobs=types_pb2.LogprobOptions())
    starts = await starts_of(worker, 3)
    assert [start.sampling.seed for start in starts] == [7, derived_seed(7, 1), derived_seed(7, 2)]
    assert {start.token_ids for start in starts} == {tuple(token_ids("ab"))}

    def say(index: int, text: str, length: int, *, end: bool = False) -> None:
        ids = [*token_ids(text), *([EOS] if end else [])]
        entries = [m.TokenLogprobs(-index - at - 0.5) for at in range(len(ids))]
        base_len = 2 + length
        worker.say(worker.progress(starts[index], ids, base_len=base_len, logprobs=entries))

    async def shows(index: int, text: str) -> None:
        await until(lambda: done.samples[index].text == text, f"sample {index} shows {text}")

    say(2, "C", 0)
    await shows(2, "C")
    say(0, "a", 0)
    await shows(0, "a")
    say(2, "D", 1)
    await shows(2, "CD")
    say(0, "", 1, end=True)
    await until(lambda: done.samples[0].finished is not None, "sample 0 has ended")
    assert done.order == [2, 0, 2, 0, 0]
    say(1, "xyz", 0, end=True)
    say(2, "", 2, end=True)
    await done.end()
    assert done.started is not None
    assert (done.started.session_id, done.started.seed) == ("s", 7)
    assert {i: s.text for i, s in done.samples.items()} == {0: "a", 1: "xyz", 2: "CD"}
    assert done.samples[1].token_ids == [*token_ids("xyz"), EOS]
    for index, length in enumerate((2, 4, 3)):
        finished = done.samples[index].finished
        assert finished is not None
        assert finished.usage == pb.Usage(prompt_tokens=2, completion_tokens=length)
    last = done.samples[1].pieces[-1].logprobs
    assert last == types_pb2.TokenLogprobs(logprob=-4.5)
    for session_id, text in (("s", "a"), ("s.1", "xyz"), ("s.2", "CD")):
        record, log = await stack.records.read(session_id)
        assert record.finish_reason is m.FinishReason.STOP
        assert log == [*token_ids(f"ab{text}"), EOS]


async def test_cancel_of_the_request_cancels_every_sample(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    done = stack.generate("ab", n=3)
    starts = await starts_of(worker, 3)
    worker.say(worker.progress(starts[0], [EOS]), worker.progress(starts[1], "x"))
    await until(lambda: done.samples[1].text == "x", "sample 1 shows x")
    await until(lambda: done.samples[0].finished is not None, "sample 0 has ended")
    assert (await stack.client.Cancel(pb.CancelRequest(session_id="s"))).cancelled
    await done.end()
    reasons = [done.samples[i].finished.reason for i in range(3)]  # type: ignore[union-attr]
    assert reasons == [
        types_pb2.FINISH_REASON_STOP,
        types_pb2.FINISH_REASON_CANCELLED,
        types_pb2.FINISH_REASON_CANCELLED,
    ]
    for name in ("s.1", "s.2"):
        await worker.closed(name)
        assert await reason_of(stack, name) is m.FinishReason.CANCELLED
    assert not (await stack.client.Cancel(pb.CancelRequest(session_id="s"))).cancelled
    assert stack.coordinator._sessions.running == {}


async def test_cancel_of_one_sample_leaves_the_others_alone(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    done = stack.generate("ab", n=2)
    starts = await starts_of(worker, 2)
    assert (await stack.client.Cancel(pb.CancelRequest(session_id="s.1"))).cancelled
    await until(lambda: done.samples[1].finished is not None, "sample 1 has ended")
    worker.say(worker.progress(starts[0], [*token_ids("x"), EOS]))
    assert (await done.end()).reason == types_pb2.FINISH_REASON_STOP
    assert done.text == "x"


async def test_cancel_while_samples_still_start(stack: Stack) -> None:
    await stack.start_coordinator()
    done = stack.generate("ab", n=3)  # no verify worker: the first one waits for its place

    async def is_waiting() -> bool:
        return "s" in stack.coordinator._sessions.running

    await until_async(is_waiting, "the first sample waits")
    assert (await stack.client.Cancel(pb.CancelRequest(session_id="s"))).cancelled
    worker = await stack.add_verify()
    await done.end()
    assert {s.finished.reason for s in done.samples.values() if s.finished} == {
        types_pb2.FINISH_REASON_CANCELLED
    }
    assert len(done.samples) == 3
    status = await stack.client.GetStatus(pb.GetStatusRequest())
    assert status.running_sessions == 0
    assert worker.of(m.StartSession, "s") == []


async def test_a_sample_that_fails_fails_the_call_and_closes_the_others(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    done = stack.generate("ab", n=3)
    starts = await starts_of(worker, 3)
    worker.say(worker.progress(starts[0], "x"))
    await done.shows("x")
    error = NumericsError("NaN in the logits")
    worker.say(m.SessionFailed(session_id="s.1", epoch=starts[1].epoch, error=error))
    with pytest.raises(NumericsError, match="NaN"):
        await done.end()
    for name in ("s", "s.1", "s.2"):
        await worker.closed(name)
    assert await reason_of(stack, "s") is m.FinishReason.CANCELLED
    assert await reason_of(stack, "s.1") is m.FinishReason.ERROR
    status = await stack.client.GetStatus(pb.GetStatusRequest())
    assert status.running_sessions == 0
    assert [info.sessions for info in status.workers] == [0]


async def test_a_sample_that_can_t_start_closes_those_that_have(stack: Stack) -> None:
    coordinator = await stack.start_coordinator()
    done = stack.generate("ab", n=3)
    # As long as no worker is there, nobody knows how much room there will be.
    await until(lambda: bool(coordinator._sessions.running), "a sample that waits for a worker")
    worker = await stack.add_verify(capacity=2)
    with pytest.raises(OverloadedError, match="all 1 verify workers are full"):
        await done.end()
    for name in ("s", "s.1"):
        await worker.closed(name)
        assert (await stack.records.read(name))[0].state is SessionState.PAUSED
    # Their places are free again.
    again = stack.generate("ab", session_id="t", n=2)
    await worker.started("t.1")
    await again.cancel()


async def test_a_client_that_goes_takes_every_sample_along(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    done = stack.generate("ab", n=2)
    starts = await starts_of(worker, 2)
    worker.say(worker.progress(starts[1], "x"))
    await until(lambda: done.samples[1].text == "x", "sample 1 shows x")
    await done.cancel()
    for name in ("s", "s.1"):
        await worker.closed(name)

    async def released() -> bool:
        return not stack.coordinator._sessions.running and not stack.coordinator._sessions.claims

    await until_async(released, "nothing is left of the request")


async def test_no_request_has_the_id_of_a_sample_of_another(stack: Stack) -> None:
    """Or one could take over, and cancel, what belongs to the other."""
    await stack.start_coordinator()
    worker = await stack.add_verify()
    for session_id in ("s.1", "s.x.07"):
        with pytest.raises(InvalidRequestError, match="must not end in a dot and a number"):
            await stack.generate("ab", session_id=session_id).end()
    one = stack.generate("ab", session_id="s.1b.x")
    start = await worker.started("s.1b.x")
    worker.say(worker.progress(start, [*token_ids("x"), EOS]))
    await one.end()
    assert one.text == "x"


async def test_too_many_samples_are_refused(stack: Stack) -> None:
    await stack.start_coordinator()
    with pytest.raises(InvalidRequestError, match="n must be at most 16, not 17"):
        await stack.generate("ab", n=17).end()


@pytest.mark.parametrize("session_id", ["s.1", "s.22", "a.b.0"])
async def test_no_request_has_an_id_that_may_be_a_samples(stack: Stack, session_id: str) -> None:
    await stack.start_coordinator()
    await stack.add_verify()
    with pytest.raises(InvalidRequestError, match="session_id"):
        await stack.generate(session_id=session_id).end()


@pytest.mark.parametrize("session_id", ["s.1a", "1", "s.", "s-1"])
async def test_other_ids_are_taken(stack: Stack, session_id: str) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    done = stack.generate(session_id=session_id)
    worker.say(worker.progress(await worker.started(session_id), [EOS]))
    await done.end()
