"""Logprobs, echo, stop strings in the text, ignored ends: what a client is given, end to end."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from outrider import messages as m
from outrider.errors import InternalError
from outrider.pb.v1 import coordinator_pb2 as pb
from outrider.pb.v1 import types_pb2
from tests.support.coordinator_stack import EOS, Stack, running_stack, token_ids

WITH_LOGPROBS = types_pb2.LogprobOptions(top=1)


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_stack() as stack:
        yield stack


def logprobs_of(ids: Sequence[int], first: int = 0) -> list[m.TokenLogprobs]:
    """Different for each place; `first` is the place of the first one."""
    return [m.TokenLogprobs(-0.5 - first - at, ((i, -0.25),)) for at, i in enumerate(ids)]


async def test_every_parameter_reaches_the_worker_and_the_record(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    await stack.ready()
    done = stack.generate(
        "ab",
        temperature=0.5,
        seed=3,
        min_p=0.05,
        repetition_penalty=1.2,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        logit_bias=[types_pb2.LogitBias(token_id=5, bias=-3.5)],
        bad_words=["q"],
        bad_words_ids=[types_pb2.TokenIds(ids=[1, 2])],
        min_tokens=2,
        allowed_token_ids=[1, 2, 3],
        banned_token_ids=[3],
        stop_token_ids=[9],
        ignore_eos=True,
        include_stop=True,
        stop=["!", "?"],
        logprobs=types_pb2.LogprobOptions(top=4, processed=True),
        speculation=types_pb2.SpeculationOptions(draft_len=3),
    )
    start = await worker.started()
    assert start.sampling == m.SamplingParams(
        0.5,
        0,
        1.0,
        3,
        min_p=0.05,
        repetition_penalty=1.2,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        logit_bias=((5, -3.5),),
        bad_words=(tuple(token_ids("q")), tuple(token_ids(" q")), (1, 2)),
        min_tokens=2,
        allowed_ids=(1, 2, 3),
        banned_ids=(3,),
    )
    assert start.logprobs == m.LogprobOptions(4, processed=True)
    assert start.endings == m.Endings(62, frozenset({9}))
    # The record says the same, so that whoever takes the session over goes on in the same way.
    record, _ = await stack.records.read("s")
    assert record.sampling == start.sampling
    assert record.logprobs == start.logprobs
    assert record.speculation == start.speculation == m.SpeculationOptions(draft_len=3)
    assert (record.stop, record.stop_ids) == (("!", "?"), (9,))
    assert (record.ignore_eos, record.include_stop) == (True, True)
    await done.cancel()
    rest = stack.resume(0)
    again = await worker.started(times=2)
    assert again.epoch > start.epoch
    assert replace(again, epoch=start.epoch) == start
    await rest.cancel()


async def test_21_one_logprob_for_each_token_and_the_last_of_a_cut_round_too(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    done = stack.generate("ab", stop=["z"], logprobs=WITH_LOGPROBS)
    start = await worker.started()
    wanted = logprobs_of(token_ids("xyz?!"))
    worker.say(
        worker.progress(start, "x", logprobs=wanted[:1]),
        worker.progress(start, "yz?!", base_len=3, draft_tokens=3, logprobs=wanted[1:]),
    )
    finished = await done.end()
    assert (done.text, done.token_ids) == ("xy", token_ids("xyz"))
    assert done.logprobs == wanted[:3]
    assert finished.usage.completion_tokens == 3


async def test_21_no_top_logprobs_and_no_logprobs_unless_they_are_wanted(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify(capacity=8)
    own = stack.generate("ab", session_id="own", logprobs=types_pb2.LogprobOptions(top=0))
    none = stack.generate("ab", session_id="none")
    starts = await worker.started("own"), await worker.started("none")
    assert [start.logprobs for start in starts] == [m.LogprobOptions(0), None]
    bare = [m.TokenLogprobs(-1.5), m.TokenLogprobs(-2.5)]
    for start in starts:
        worker.say(worker.progress(start, [*token_ids("x"), EOS], logprobs=bare))
    await own.end()
    await none.end()
    assert own.logprobs == bare
    assert not any(piece.HasField("logprobs") for piece in none.samples[0].pieces)


async def test_21_tokens_from_before_a_failover_keep_their_logprobs(stack: Stack) -> None:
    await stack.start_coordinator()
    first = await stack.add_verify("v1")
    await stack.ready()
    done = stack.generate("ab", logprobs=WITH_LOGPROBS)
    start = await first.started()
    wanted = logprobs_of([*token_ids("xy"), EOS])
    first.say(first.progress(start, "x", logprobs=wanted[:1]))
    await done.shows("x")
    second = await stack.add_verify("v2")
    await stack.ready()
    await first.server.stop(0)
    start = await second.started()
    assert start.logprobs == m.LogprobOptions(1)
    second.say(second.progress(start, [*token_ids("y"), EOS], logprobs=wanted[1:]))
    await done.end()
    assert done.token_ids == [*token_ids("xy"), EOS]
    assert done.logprobs == wanted


async def test_21_a_worker_that_leaves_logprobs_out_is_a_fault(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    done = stack.generate("ab", logprobs=WITH_LOGPROBS)
    worker.say(worker.progress(await worker.started(), "xy"))
    with pytest.raises(InternalError, match=r"verify worker v1.*without the logprobs"):
        await done.end()
    assert done.token_ids == []


async def test_13_the_model_s_ends_are_ignored_and_the_client_s_are_not(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    ids = [*token_ids("x"), EOS, *token_ids("yz!")]
    done = stack.generate(ignore_eos=True, stop_token_ids=token_ids("z"))
    start = await worker.started()
    assert start.endings.stop_ids == frozenset(token_ids("z"))
    worker.say(worker.progress(start, ids, draft_tokens=4))
    assert (await done.end()).reason == types_pb2.FINISH_REASON_STOP
    assert (done.text, done.token_ids) == ("xy", ids[:4])


@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one STOP")])
async def test_14_the_first_of_several_stop_strings_over_two_rounds(
    stack: Stack, include: bool, text: str
) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    done = stack.generate(stop=["never", "STOP", "TOP?"], include_stop=include)
    start = await worker.started()
    worker.say(worker.progress(start, "one ST", draft_tokens=5))
    await done.shows("one ST" if include else "one ")
    worker.say(worker.progress(start, "OP and more", base_len=8, draft_tokens=10))
    assert (await done.end()).reason == types_pb2.FINISH_REASON_STOP
    assert (done.text, done.token_ids) == (text, token_ids("one STOP"))


@pytest.mark.parametrize(
    ("prompt", "ids", "text"),
    [
        ({"text": "Hi 🙂"}, token_ids("Hi 🙂"), "Hi 🙂"),
        ({"token_ids": [*token_ids("Hi"), EOS]}, [*token_ids("Hi"), EOS], "Hi<eos>"),
        ({"token_ids": token_ids("🙂")[:2]}, token_ids("🙂")[:2], "\ufffd"),
    ],
)
async def test_32_the_prompt_comes_back_in_started_and_never_in_a_delta(
    stack: Stack, prompt: dict[str, object], ids: list[int], text: str
) -> None:
    if "token_ids" in prompt:
        prompt = {"token_ids": types_pb2.TokenIds(ids=ids)}
    await stack.start_coordinator()
    worker = await stack.add_verify()
    done = stack.request(pb.GenerateRequest(session_id="s", echo=True, **prompt))
    start = await worker.started()
    rest = [*token_ids("🙂")[2:], *token_ids("ok"), EOS]
    worker.say(worker.progress(start, rest))
    await done.end()
    assert done.started is not None
    assert list(done.started.prompt_token_ids) == list(start.token_ids) == ids
    assert done.started.prompt_text == text
    assert "🙂" not in done.text
    assert done.text.endswith("ok")
    assert done.token_ids == rest


async def test_without_echo_the_prompt_stays_where_it_is(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    done = stack.generate("ab")
    worker.say(worker.progress(await worker.started(), [EOS]))
    await done.end()
    assert done.started is not None
    assert (done.started.prompt_text, list(done.started.prompt_token_ids)) == ("", [])
