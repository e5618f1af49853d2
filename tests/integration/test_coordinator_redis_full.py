"""Redis is full for a while: running sessions go on, and what they said is written later."""

from collections.abc import AsyncIterator

import pytest

from outrider.errors import RecordsUnavailableError, UnavailableError
from tests.support.coordinator_stack import EOS, Stack, running_stack, token_ids, until_async


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_stack() as stack:
        yield stack


async def test_full_for_longer_than_workers_are_remembered(stack: Stack) -> None:
    await stack.start_coordinator(place_wait_s=0.0)
    worker = await stack.add_verify("v1")
    await stack.ready()
    done = stack.generate("ab")
    start = await worker.started()
    await stack.redis.command("CONFIG", "SET", "maxmemory", 1)
    worker.say(worker.progress(start, "c"))
    await done.shows("c")
    # Nobody can announce itself, so the registry forgets the worker; its stream is there.
    await until_async(lambda: _forgotten(stack), "a registry without the worker")
    worker.say(worker.progress(start, "d", base_len=3))
    await done.shows("cd")
    with pytest.raises(UnavailableError):
        await stack.generate("x", session_id="new").end()
    assert await stack.redis.command("STRLEN", "outrider:{s}:tokens") == 4 * 2
    await stack.redis.command("CONFIG", "SET", "maxmemory", 0)
    await until_async(lambda: _logged(stack, "abcd"), "the whole log")
    worker.say(worker.progress(start, [*token_ids("e"), EOS], base_len=4))
    await done.end()
    assert done.text == "cde"
    await stack.ready()
    new = stack.generate("x", session_id="new")
    again = await worker.started("new")
    worker.say(worker.progress(again, [EOS]))
    await new.end()


async def _forgotten(stack: Stack) -> bool:
    return not await stack.registry.list_workers()


async def _logged(stack: Stack, text: str) -> bool:
    try:
        return (await stack.records.read("s"))[1] == token_ids(text)
    except RecordsUnavailableError:
        return False
