"""The coordinator places sessions where their prefix is, as a real Valkey tells it."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from outrider.session.prefixes import Holder, PrefixDirectory, published_prefixes
from tests.support.coordinator_stack import (
    MODEL,
    Completion,
    FakeVerifyWorker,
    Stack,
    running_stack,
    token_ids,
)

LONG = replace(MODEL, context_len=1024)
TEXT = "It begins like this, and goes on for a while. " * 5


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_stack() as stack:
        yield stack


async def publish(stack: Stack, holder: Holder, tokens: int) -> None:
    prefixes = published_prefixes("kv", token_ids(TEXT)[:tokens])
    hashes = [prefix.block_hash for prefix in prefixes]
    await PrefixDirectory(stack.redis).change("kv", holder, held=hashes)


async def workers(stack: Stack, **fields: object) -> dict[str, FakeVerifyWorker]:
    fakes = {
        name: await stack.add_verify(name, kv_fingerprint="kv", **fields) for name in ("v1", "v2")
    }
    await stack.start_coordinator(model=LONG)
    await stack.ready()
    return fakes


async def placed(stack: Stack, session_id: str, text: str = TEXT) -> tuple[str, Completion]:
    call = stack.generate(text, session_id=session_id)
    await call.begun.wait()
    record, _ = await stack.records.read(session_id)
    return record.verify_worker_id, call


async def test_a_session_goes_where_its_prefix_is(stack: Stack) -> None:
    await workers(stack)
    assert (await placed(stack, "before"))[0] == "v1"
    # v1 has one session now; with the prefix it would take this one all the same.
    await publish(stack, Holder("v1", "i1"), 200)
    assert (await placed(stack, "held"))[0] == "v1"
    # Another text, and one that is too short, go to the least loaded.
    assert (await placed(stack, "other", TEXT[1:]))[0] == "v2"
    assert (await placed(stack, "short", TEXT[:60]))[0] == "v2"


async def test_the_longest_prefix_of_a_living_worker_counts(stack: Stack) -> None:
    await workers(stack)
    await publish(stack, Holder("v1", "i1"), 64)
    await publish(stack, Holder("v2", "i1"), 128)
    # What an earlier process of the worker had is gone with it.
    await publish(stack, Holder("v1", "i0"), 200)
    assert (await placed(stack, "a"))[0] == "v2"


async def test_a_busy_holder_is_relieved(stack: Stack) -> None:
    await workers(stack, capacity=4)
    await publish(stack, Holder("v2", "i1"), 200)
    # A quarter of 4: it is taken in spite of one session more than the other has.
    names = [(await placed(stack, f"s{number}"))[0] for number in range(4)]
    assert names == ["v2", "v2", "v1", "v2"]


async def test_a_session_that_lost_its_worker_goes_where_its_text_is(stack: Stack) -> None:
    fakes = await workers(stack)
    third = await stack.add_verify("v3", kv_fingerprint="kv")
    await stack.ready()
    name, call = await placed(stack, "s")
    assert name == "v1"
    await publish(stack, Holder("v3", "i1"), 128)
    start = await fakes["v1"].started("s")
    fakes["v1"].say(fakes["v1"].progress(start, "!"))
    await call.shows("!")
    # v2 is as idle, and comes first by its name.
    fakes["v1"].end_stream()
    again = await third.started("s")
    assert (again.epoch, again.token_ids) == (2, (*start.token_ids, *token_ids("!")))
