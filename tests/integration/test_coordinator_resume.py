"""Sessions that are followed again: by another call, at another coordinator, after a loss."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from outrider import messages as m
from outrider.errors import (
    FencedError,
    NumericsError,
    RecordsUnavailableError,
    UnavailableError,
    UnknownSessionError,
)
from outrider.pb.v1 import coordinator_pb2 as pb
from outrider.pb.v1 import types_pb2
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


async def begin(
    stack: Stack, worker: FakeVerifyWorker, said: str = "x", **fields: Any
) -> tuple[Completion, m.StartSession]:
    done = stack.generate("ab", **fields)
    start = await worker.started()
    logprobs = [m.TokenLogprobs(-1.5, ((1, -1.5),))] * len(said) if "logprobs" in fields else ()
    worker.say(worker.progress(start, said, logprobs=logprobs))
    await until(lambda: len(done.token_ids) == len(said), f"{said} has come")
    return done, start


async def two_coordinators(stack: Stack) -> tuple[Any, Any]:
    """The stubs of two coordinators, c1 and c2; `stack.client` is that of c2."""
    await stack.start_coordinator()
    one = stack.client
    await stack.start_coordinator(worker_id="c2")
    return one, stack.client


async def test_a_session_goes_on_where_its_client_lost_it(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    done, _ = await begin(stack, worker, "xyz")
    await done.cancel()
    await paused(stack)
    rest = stack.resume(2)
    start = await worker.started(times=2)
    assert start.token_ids == tuple(token_ids("abxyz"))
    assert start.prompt_len == 2
    worker.say(worker.progress(start, [*token_ids("!"), EOS]))
    finished = await rest.end()
    assert rest.text == "z!"
    assert rest.token_ids == [*token_ids("z!"), EOS]
    assert rest.started == done.started
    assert finished.usage == pb.Usage(prompt_tokens=2, completion_tokens=5)
    # What was counted before the loss counts.
    assert finished.speculation.rounds == 2
    assert (await stack.records.read("s"))[1] == [*token_ids("abxyz!"), EOS]


async def test_another_coordinator_takes_over_and_the_former_one_is_fenced(stack: Stack) -> None:
    one, two = await two_coordinators(stack)
    worker = await stack.add_verify()
    first = stack.request(pb.GenerateRequest(session_id="s", text="ab", seed=7), at=one)
    start = await worker.started()
    worker.say(worker.progress(start, "x"))
    await first.shows("x")
    rest = stack.resume(1, at=two)
    again = await worker.started(times=2)
    assert again.epoch > start.epoch
    assert again.sampling.seed == 7
    # Nothing is said to the first one any more; its lease tells it.
    with pytest.raises(FencedError, match="taken over"):
        await first.end()
    worker.say(worker.progress(again, "y"))
    await rest.shows("y")
    record, log = await stack.records.read("s")
    assert (record.owner, record.epoch, record.state) == ("c2", again.epoch, SessionState.RUNNING)
    assert log == token_ids("abxy")


async def test_a_resume_takes_the_session_from_a_call_that_is_still_there(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    done, _ = await begin(stack, worker)
    rest = stack.resume(1)
    with pytest.raises(FencedError, match="resumed by another call"):
        await done.end()
    start = await worker.started(times=2)
    worker.say(worker.progress(start, [*token_ids("y"), EOS]))
    await rest.end()
    assert rest.text == "y"
    status = await stack.client.GetStatus(pb.GetStatusRequest())
    assert status.running_sessions == 0
    assert [info.sessions for info in status.workers] == [0]


async def test_a_resume_takes_the_session_from_a_call_that_reads_nothing(stack: Stack) -> None:
    """Its coordinator can't write to it, and is stuck in the middle of that."""
    await stack.start_coordinator()
    worker = await stack.add_verify()
    wanted = types_pb2.LogprobOptions(top=20)
    call = stack.client.Generate(pb.GenerateRequest(session_id="s", text="ab", logprobs=wanted))
    await call.read()
    start = await worker.started()
    running = stack.coordinator._sessions.running["s"]
    # Nobody reads on, so one of these fills what grpc buffers, and the next one is not taken.
    large = m.TokenLogprobs(-1.0, ((1, -1.0),) * 40_000)
    said: list[m.Progress] = []
    with suppress(TimeoutError):
        while True:
            said.append(worker.progress(start, "x", base_len=2 + len(said), logprobs=[large]))
            worker.say(said[-1])
            async with asyncio.timeout(1):
                await until(lambda: len(running.journal.token_ids) == 2 + len(said), "it is taken")
    # So much was said that Redis may have been given up for a moment.
    await until(lambda: not running.journal.behind, "all of it is logged")
    rest = stack.resume(2**31)
    await until(lambda: running._closed, "the former call is over")
    again = await worker.started(times=2)
    small = m.TokenLogprobs(-1.0)
    worker.say(worker.progress(again, [EOS], logprobs=[small]))
    assert (await rest.end()).usage.completion_tokens == len(again.token_ids) - 2 + 1
    assert stack.coordinator._sessions.running == {}
    call.cancel()


async def test_tokens_that_the_log_lost_are_made_again_and_not_sent(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    done, _ = await begin(stack, worker, "x")
    await done.cancel()
    await paused(stack)
    rest = stack.resume(3)  # it has "xyz"
    start = await worker.started(times=2)
    assert start.token_ids == tuple(token_ids("abx"))
    worker.say(worker.progress(start, "y"))
    worker.say(worker.progress(start, "z!", base_len=4))
    await rest.shows("!")
    worker.say(worker.progress(start, [EOS], base_len=6))
    await rest.end()
    assert rest.token_ids == [*token_ids("!"), EOS]


async def test_under_the_rejection_rule_lost_tokens_are_not_made_again(stack: Stack) -> None:
    """They might be other ones."""
    await stack.start_coordinator(trust_draft_worker=("all",))
    worker = await stack.add_verify()
    stack.add_draft("d1")
    await stack.ready()
    rejection = types_pb2.SpeculationOptions(rule=types_pb2.ACCEPTANCE_RULE_REJECTION)
    done, _ = await begin(stack, worker, "x", temperature=1.0, speculation=rejection)
    await done.cancel()
    await paused(stack)
    with pytest.raises(UnavailableError, match="has 1 tokens and its client 2"):
        await stack.resume(2).end()
    assert await state_of(stack) is SessionState.PAUSED
    rest = stack.resume(1)
    start = await worker.started(times=2)
    worker.say(worker.progress(start, [EOS]))
    await rest.end()


def has_come(done: Completion, tokens: int) -> bool:
    return len(done.token_ids) == tokens


async def test_text_is_cut_as_before(stack: Stack) -> None:
    """Text that was held back, and half a character, come out once and whole."""
    await stack.start_coordinator()
    worker = await stack.add_verify()
    text = "x<en€ab</end>cd"
    ids = token_ids(text)
    for cut in range(1, 14):
        name = f"s{cut}"
        done = stack.generate("ab", session_id=name, stop=["</end>"])
        start = await worker.started(name)
        worker.say(worker.progress(start, ids[:cut]))
        await until(partial(has_come, done, cut), "all has come")
        await done.cancel()
        await paused(stack, name)
        rest = stack.resume(cut, session_id=name)
        start = await worker.started(name, times=2)
        worker.say(worker.progress(start, ids[cut:]))
        finished = await rest.end()
        assert finished.reason == types_pb2.FINISH_REASON_STOP
        assert done.text + rest.text == "x<en€ab"
        assert done.token_ids + rest.token_ids == token_ids("x<en€ab</end>")


async def test_a_session_whose_log_holds_its_end_ends_at_once(stack: Stack) -> None:
    """Its coordinator went before it could note the end."""
    await stack.start_coordinator()
    worker = await stack.add_verify()
    done, _ = await begin(stack, worker, "x", max_tokens=3)
    await done.cancel()
    await paused(stack)
    held = (await stack.records.read("s"))[0]
    more: dict[str, Any] = {"owner": "c1", "epoch": held.epoch, "token_ids": token_ids("yz")}
    await stack.records.append("s", base_len=3, **more)
    rest = stack.resume(1)
    assert (await rest.end()).reason == types_pb2.FINISH_REASON_LENGTH
    assert rest.text == "yz"
    assert len(worker.of(m.StartSession)) == 1
    assert await state_of(stack) is SessionState.FINISHED


@pytest.mark.parametrize("offset", [0, 1, 3, 9])
async def test_a_session_that_has_finished_is_told_again(stack: Stack, offset: int) -> None:
    one, two = await two_coordinators(stack)
    worker = await stack.add_verify()
    done = stack.request(pb.GenerateRequest(session_id="s", text="ab", echo=True), at=one)
    start = await worker.started()
    worker.say(worker.progress(start, [*token_ids("xy"), EOS], draft_tokens=2, cached_tokens=1))
    finished = await done.end()
    before = await stack.records.read("s")
    rest = stack.resume(offset, at=two)
    again = await rest.end()
    assert rest.started == done.started
    assert rest.token_ids == [*token_ids("xy"), EOS][offset:]
    assert rest.text == "xy"[offset:]
    assert (again.reason, again.usage) == (finished.reason, finished.usage)
    assert again.speculation == finished.speculation
    assert await stack.records.read("s") == before
    assert len(worker.of(m.StartSession)) == 1


async def test_a_session_that_failed_fails_again(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    done, start = await begin(stack, worker)
    worker.say(m.SessionFailed(session_id="s", epoch=start.epoch, error=NumericsError("NaN at 3")))
    with pytest.raises(NumericsError, match="NaN at 3"):
        await done.end()
    for offset in (0, 1):
        with pytest.raises(NumericsError, match="NaN at 3"):
            await stack.resume(offset).end()
    assert len(worker.of(m.StartSession)) == 1


async def test_logprobs_come_again(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    done, _ = await begin(stack, worker, "xy", logprobs=types_pb2.LogprobOptions(top=1))
    await done.cancel()
    await paused(stack)
    rest = stack.resume(1)
    start = await worker.started(times=2)
    worker.say(worker.progress(start, [EOS], logprobs=[m.TokenLogprobs(-0.25)]))
    await rest.end()
    assert rest.logprobs == [m.TokenLogprobs(-1.5, ((1, -1.5),)), m.TokenLogprobs(-0.25)]


async def test_every_sample_goes_on_where_it_was(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    done = stack.generate("ab", n=3)
    starts = [await worker.started(name) for name in ("s", "s.1", "s.2")]
    worker.say(
        worker.progress(starts[0], [EOS]),
        worker.progress(starts[1], "pq"),
        worker.progress(starts[2], "v"),
    )
    await until(lambda: len(done.samples[1].pieces) == 2, "sample 1 shows pq")
    await until(lambda: done.samples[0].finished is not None, "sample 0 has ended")
    await done.cancel()
    for name in ("s.1", "s.2"):
        await paused(stack, name)
    rest = stack.resume(1, 1)
    for name, text in (("s.1", "r"), ("s.2", "w")):
        start = await worker.started(name, times=2)
        worker.say(worker.progress(start, [*token_ids(text), EOS]))
    await rest.end()
    assert {i: s.text for i, s in rest.samples.items()} == {0: "", 1: "qr", 2: "vw"}
    assert len(worker.of(m.StartSession)) == 1


async def test_samples_that_never_began_are_begun(stack: Stack) -> None:
    """Their coordinator went while it was starting them."""
    await stack.start_coordinator()
    worker = await stack.add_verify(capacity=2)
    await stack.ready()
    whole = stack.generate("ab", n=2, temperature=1.0, seed=5)
    wanted = [(await worker.started(name)).sampling for name in ("s", "s.1")]
    await whole.cancel()
    for name in ("s", "s.1"):
        await paused(stack, name)
    await stack.redis.command("DEL", *[f"outrider:{{s.1}}:{key}" for key in ("session", "tokens")])
    rest = stack.resume()
    again = [await worker.started(name, times=2) for name in ("s", "s.1")]
    assert [start.sampling for start in again] == wanted
    for start in again:
        worker.say(worker.progress(start, [EOS]))
    await rest.end()
    assert len(rest.samples) == 2


async def test_what_can_t_be_resumed(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    with pytest.raises(UnknownSessionError, match="'s'"):
        await stack.resume(0).end()
    await begin(stack, worker)
    with pytest.raises(UnknownSessionError, match="'s'"):
        await stack.resume(1, tenant="eve").end()
    # The call that it tried to take is still there.
    assert await state_of(stack) is SessionState.RUNNING
    stack.valkey.terminate()
    with pytest.raises(RecordsUnavailableError):
        await stack.resume(0, session_id="other").end()


async def test_a_worker_that_has_seen_a_later_epoch_is_outbid(stack: Stack) -> None:
    """As after Redis came back without the last placements."""
    await stack.start_coordinator()
    worker = await stack.add_verify()
    done = stack.generate()
    start = await worker.started()
    fenced = FencedError("session s is here already with epoch 7")
    worker.say(m.SessionFailed(session_id="s", epoch=start.epoch, error=fenced))
    again = await worker.started(times=2)
    assert again.epoch > start.epoch + 100
    worker.say(worker.progress(again, [*token_ids("x"), EOS]))
    await done.end()
    assert (await stack.records.read("s"))[0].epoch == again.epoch
