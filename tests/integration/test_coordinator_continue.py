"""Finished sessions that are continued: text, ids and conversations."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from outrider import messages as m
from outrider.errors import InvalidRequestError, NumericsError, UnknownSessionError
from outrider.pb.v1 import coordinator_pb2 as pb
from outrider.pb.v1 import types_pb2
from tests.support.coordinator_stack import (
    EOS,
    FakeVerifyWorker,
    Stack,
    make_model,
    running_stack,
    token_ids,
)


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_stack() as stack:
        yield stack


def chat(*contents: str) -> pb.Messages:
    return pb.Messages(messages=[pb.ChatMessage(role="user", content=c) for c in contents])


async def finish(
    stack: Stack, worker: FakeVerifyWorker, said: str, session_id: str = "one", **fields: Any
) -> m.StartSession:
    """A session that said it; its start."""
    prompt = {} if "messages" in fields or "token_ids" in fields else {"text": "ab"}
    request = pb.GenerateRequest(**{"session_id": session_id, **prompt, **fields})
    done = stack.request(request)
    start = await worker.started(session_id)
    worker.say(worker.progress(start, [*token_ids(said), EOS]))
    await done.end()
    return start


async def start_of(
    stack: Stack, worker: FakeVerifyWorker, previous: str = "one", **fields: Any
) -> m.StartSession:
    stack.request(pb.GenerateRequest(session_id="two", previous_session_id=previous, **fields))
    return await worker.started("two")


async def test_text_and_ids_follow_all_that_was_there(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    await finish(stack, worker, "xy")
    start = await start_of(stack, worker, text="cd")
    assert start.token_ids == (*token_ids("abxy"), EOS, *token_ids("cd"))
    assert start.prompt_len == 7
    worker.say(worker.progress(start, [*token_ids("z"), EOS]))
    stack.request(
        pb.GenerateRequest(
            session_id="three",
            previous_session_id="two",
            token_ids=types_pb2.TokenIds(ids=[5, 6]),
        )
    )
    third = await worker.started("three")
    assert third.token_ids == (*start.token_ids, *token_ids("z"), EOS, 5, 6)


async def test_a_conversation_goes_on(stack: Stack) -> None:
    await stack.start_coordinator(model=make_model(chats=True))
    worker = await stack.add_verify()
    # What was cut off by a stop string was not said.
    first = await finish(stack, worker, "Ho!#", messages=chat("Hi"), stop=["#"])
    assert first.token_ids == tuple(token_ids("u:Hi;a:"))
    second = await start_of(stack, worker, messages=chat("Who?"))
    assert second.token_ids == tuple(token_ids("u:Hi;a:Ho!;u:Who?;a:"))
    worker.say(worker.progress(second, [*token_ids("Me"), EOS]))
    stack.request(
        pb.GenerateRequest(session_id="three", previous_session_id="two", messages=chat("No"))
    )
    third = await worker.started("three")
    assert third.token_ids == tuple(token_ids("u:Hi;a:Ho!;u:Who?;a:Me;u:No;a:"))


async def test_any_coordinator_continues_one_of_several_completions(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    done = stack.generate("ab", session_id="one", n=2)
    for name, said in (("one", "x"), ("one.1", "y")):
        worker.say(worker.progress(await worker.started(name), [*token_ids(said), EOS]))
    await done.end()
    await stack.start_coordinator(worker_id="c2")
    start = await start_of(stack, worker, "one.1", text="cd")
    assert start.token_ids == (*token_ids("aby"), EOS, *token_ids("cd"))


async def test_echo_shows_all_of_the_prompt(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    await finish(stack, worker, "xy")
    request = pb.GenerateRequest(session_id="two", previous_session_id="one", text="cd", echo=True)
    done = stack.request(request)
    worker.say(worker.progress(await worker.started("two"), [EOS]))
    await done.end()
    assert done.started is not None
    assert done.started.prompt_text == "abxy<eos>cd"
    assert list(done.started.prompt_token_ids) == [*token_ids("abxy"), EOS, *token_ids("cd")]


@pytest.mark.parametrize(
    ("tenant", "fields", "kind", "said"),
    [
        ("", {"previous_session_id": "none"}, UnknownSessionError, "'none'"),
        ("eve", {}, UnknownSessionError, "'one'"),
        ("", {"text": "x" * 60}, InvalidRequestError, "has 64 tokens"),
        ("", {"messages": chat("Hi")}, InvalidRequestError, "not begun with messages"),
        ("", {"previous_session_id": "running"}, InvalidRequestError, "it is running"),
        ("", {"previous_session_id": "failed"}, InvalidRequestError, "has not ended well"),
    ],
)
async def test_what_can_t_be_continued(
    stack: Stack, tenant: str, fields: dict[str, Any], kind: type[Exception], said: str
) -> None:
    await stack.start_coordinator(model=make_model(chats=True))
    worker = await stack.add_verify()
    await finish(stack, worker, "x")
    stack.generate("ab", session_id="running")
    await worker.started("running")
    failing = stack.generate("ab", session_id="failed")
    epoch = (await worker.started("failed")).epoch
    worker.say(m.SessionFailed(session_id="failed", epoch=epoch, error=NumericsError("NaN")))
    with pytest.raises(NumericsError):
        await failing.end()
    prompt = {} if "messages" in fields else {"text": "cd"}
    asked = {"session_id": "two", "previous_session_id": "one", **prompt, **fields}
    with pytest.raises(kind, match=said):
        await stack.request(pb.GenerateRequest(**asked), tenant=tenant).end()
