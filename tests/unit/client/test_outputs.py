"""Logprobs, echo and several completions, through both clients."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from outrider import AsyncClient, Client
from outrider.client import TokenLogprobs
from outrider.errors import InternalError, InvalidRequestError
from outrider.messages import FinishReason
from outrider.pb.v1 import types_pb2
from outrider.sampling.seeds import derived_seed
from tests.support.fake_coordinator import (
    PLAIN,
    SCRIPT,
    TWO,
    FakeCoordinator,
    Step,
    delta,
    finished,
    logprobs,
    serving,
    serving_in_thread,
    started,
)


@pytest.fixture
def fake() -> Iterator[FakeCoordinator]:
    with serving_in_thread(SCRIPT) as coordinator:
        yield coordinator


@pytest.fixture
def client(fake: FakeCoordinator) -> Iterator[Client]:
    with Client(fake.address) as made:
        yield made


def test_every_parameter_is_in_the_request(client: Client, fake: FakeCoordinator) -> None:
    client.complete(
        "Hi",
        min_p=0.25,
        repetition_penalty=1.5,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        logit_bias={5: -100, 6: 0.5},
        bad_words=["no", "never"],
        bad_words_ids=[[1, 2], (3,)],
        min_tokens=4,
        allowed_token_ids=[7, 8],
        banned_token_ids=(9,),
        include_stop=True,
        ignore_eos=True,
        logprobs=3,
        logprobs_kind="processed",
        echo=True,
        rule="rejection",
    )
    request = fake.requests[0]
    assert (request.min_p, request.repetition_penalty) == (0.25, 1.5)
    assert (request.frequency_penalty, request.presence_penalty) == (0.5, -0.5)
    assert {entry.token_id: entry.bias for entry in request.logit_bias} == {5: -100, 6: 0.5}
    assert list(request.bad_words) == ["no", "never"]
    assert [list(word.ids) for word in request.bad_words_ids] == [[1, 2], [3]]
    assert request.min_tokens == 4
    assert (list(request.allowed_token_ids), list(request.banned_token_ids)) == ([7, 8], [9])
    assert (request.include_stop, request.ignore_eos, request.echo) == (True, True, True)
    assert request.logprobs == types_pb2.LogprobOptions(top=3, processed=True)
    assert request.speculation == types_pb2.SpeculationOptions(
        rule=types_pb2.ACCEPTANCE_RULE_REJECTION
    )


def test_what_is_left_out_is_absent(client: Client, fake: FakeCoordinator) -> None:
    client.complete("Hi")
    request = fake.requests[0]
    assert not any(
        request.HasField(name) for name in ("repetition_penalty", "logprobs", "speculation")
    )


@pytest.mark.parametrize(
    ("asked", "top"), [(True, 0), (0, 0), (1, 1), (20, 20), (False, None), (None, None)]
)
def test_number_of_logprobs(
    client: Client, fake: FakeCoordinator, asked: bool | int | None, top: int | None
) -> None:
    client.complete("Hi", logprobs=asked)
    request = fake.requests[0]
    assert (request.logprobs.top if request.HasField("logprobs") else None) == top


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rule": "magic"}, "coupled, rejection"),
        ({"logprobs_kind": "best"}, "raw or processed"),
        ({"bad_words": "no"}, "a list of texts"),
        ({"n": 0}, "at least 1"),
        ({"n": -1}, "at least 1"),
        ({"logit_bias": {-1: 2.0}}, "bad argument"),
        ({"banned_token_ids": [-1]}, "bad argument"),
        ({"min_tokens": -1}, "bad argument"),
    ],
)
def test_wrong_arguments_are_refused_before_any_call(
    client: Client, fake: FakeCoordinator, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        client.generate("Hi", **options)
    assert fake.requests == []


WITH_LOGPROBS: list[Step] = [
    started(prompt_text="Hi 🙂", prompt_token_ids=[1, 2, 3]),
    delta(0, (5, "a", PLAIN), logprobs=[logprobs(-0.5, (5, -0.5), (6, -1.5))]),
    delta(1, (6, "b", PLAIN), (7, "", PLAIN), logprobs=[logprobs(-0.25), logprobs(-2.0)]),
    finished(3),
]


def test_21_logprobs_are_with_their_tokens(client: Client, fake: FakeCoordinator) -> None:
    fake.script = WITH_LOGPROBS
    generation = client.generate("Hi", logprobs=2)
    pieces = [piece for chunk in generation for piece in chunk.pieces]
    assert pieces[0].logprobs == TokenLogprobs(-0.5, ((5, -0.5), (6, -1.5)))
    completion = generation.complete()
    assert [entry.logprob for entry in completion.logprobs] == [-0.5, -0.25, -2.0]
    assert len(completion.logprobs) == len(completion.token_ids)


def test_without_logprobs_there_are_none(client: Client) -> None:
    completion = client.complete("Hi")
    assert completion.logprobs == ()
    assert {piece.logprobs for piece in completion.pieces} == {None}


def test_32_the_prompt_is_apart_from_the_text(client: Client, fake: FakeCoordinator) -> None:
    fake.script = WITH_LOGPROBS
    generation = client.generate("Hi 🙂", echo=True)
    texts = []
    for chunk in generation:
        assert generation.prompt_text == "Hi 🙂"
        texts.append(chunk.text)
    completion = generation.complete()
    assert "".join(texts) == completion.text == "ab"
    assert (completion.prompt_text, completion.prompt_token_ids) == ("Hi 🙂", (1, 2, 3))


def check_two(completions: list[Any], session_id: str) -> None:
    assert [c.index for c in completions] == [0, 1]
    assert [c.text for c in completions] == ["ab!", "ABC"]
    assert [c.token_ids for c in completions] == [(5, 6), (15, 16, 17)]
    assert [c.session_id for c in completions] == [session_id, f"{session_id}.1"]
    assert [c.seed for c in completions] == [7, derived_seed(7, 1)]
    assert [c.finish_reason for c in completions] == [FinishReason.STOP, FinishReason.LENGTH]
    assert [c.usage.completion_tokens for c in completions] == [2, 3]


def test_several_completions(client: Client, fake: FakeCoordinator) -> None:
    fake.script = TWO
    generation = client.generate("Hi", n=2)
    chunks = list(generation)
    assert [chunk.index for chunk in chunks] == [0, 1, 1, 0, 0, 1]
    assert [chunk.offset for chunk in chunks] == [0, 0, 1, 1, 2, 2]
    check_two(generation.complete_all(), generation.session_id)
    check_two(client.complete_all("Hi", n=2, session_id="mine"), "mine")
    assert [request.n for request in fake.requests] == [2, 2]


def test_one_completion_can_be_asked_for_as_all(client: Client) -> None:
    (completion,) = client.complete_all("Hi")
    assert completion.text == "Hello w!"


def test_complete_gives_one_and_says_so(client: Client, fake: FakeCoordinator) -> None:
    with pytest.raises(InvalidRequestError, match=r"n=2.*complete_all"):
        client.complete("Hi", n=2)
    assert fake.requests == []
    fake.script = TWO
    generation = client.generate("Hi", n=2)
    with pytest.raises(InvalidRequestError, match="complete_all"):
        generation.complete()
    assert len(generation.complete_all()) == 2


def test_a_completion_nobody_asked_for_is_an_error(client: Client, fake: FakeCoordinator) -> None:
    fake.script = TWO
    with pytest.raises(InternalError, match="got completion 1 of the 1"):
        client.complete("Hi")


def test_a_stream_that_ends_before_every_completion_has(
    client: Client, fake: FakeCoordinator
) -> None:
    fake.script = TWO[:-1]
    with pytest.raises(InternalError, match="ended too early"):
        client.complete_all("Hi", n=2)


async def test_asynchronous_client() -> None:
    async with serving(TWO) as fake, AsyncClient(fake.address) as client:
        generation = client.generate("Hi", n=2)
        assert [chunk.index async for chunk in generation] == [0, 1, 1, 0, 0, 1]
        with pytest.raises(InvalidRequestError, match="complete_all"):
            await generation.complete()
        check_two(await generation.complete_all(), generation.session_id)
        check_two(await client.complete_all("Hi", n=2, session_id="mine"), "mine")
        with pytest.raises(InvalidRequestError, match="complete_all"):
            await client.complete("Hi", n=2)
        assert len(fake.requests) == 2


async def test_cancelled_in_the_middle_of_several() -> None:
    async with serving([*TWO[:5], asyncio.Event()]) as fake, AsyncClient(fake.address) as client:
        generation = client.generate("Hi", n=2)
        async for chunk in generation:
            if chunk.index == 0 and chunk.offset == 1:
                generation.cancel()
        first, second = await generation.complete_all()
        assert (first.text, second.text) == ("ab", "AB")
        assert {first.finish_reason, second.finish_reason} == {FinishReason.CANCELLED}
