"""Verify workers that hang: their sessions go on elsewhere, and nobody gives them new ones."""

from collections.abc import AsyncIterator

import pytest

from outrider import messages as m
from outrider.pb.v1 import coordinator_pb2 as pb
from tests.support.coordinator_stack import FakeVerifyWorker, Stack, running_stack, until


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_stack() as stack:
        yield stack


async def placed(stack: Stack) -> tuple[FakeVerifyWorker, FakeVerifyWorker, m.StartSession]:
    """Two workers and a session on the first of them, after its first token."""
    await stack.start_coordinator(verify_silence_s=1.0)
    first = await stack.add_verify("v1")
    await stack.ready()
    completion = stack.generate("ab", max_tokens=3)
    start = await first.started()
    other = await stack.add_verify("v2")
    await stack.ready()
    first.say(first.progress(start, "c"))
    await completion.shows("c")
    return first, other, start


@pytest.mark.parametrize("hang", ["no frames", "engine overdue"])
async def test_sessions_of_a_worker_that_hangs_are_placed_elsewhere(
    stack: Stack, hang: str
) -> None:
    first, other, before = await placed(stack)
    if hang == "no frames":
        first.silent = True
    else:
        first.heartbeat = m.Heartbeat(silent_ms=1000)
    start = await other.started()
    assert start.epoch > before.epoch
    assert len(start.token_ids) == 3
    # It is told nothing more, and is given nothing: the next session goes to the other one too.
    stack.generate("xy", session_id="t", max_tokens=1)
    await other.started("t")
    assert first.of(m.StartSession, "t") == []
    status = await stack.client.GetStatus(pb.GetStatusRequest())
    assert {w.worker_id: w.connected for w in status.workers} == {"v1": False, "v2": True}


async def test_a_worker_that_works_again_gets_sessions_again(stack: Stack) -> None:
    first, other, _ = await placed(stack)
    first.heartbeat = m.Heartbeat(silent_ms=60_000)
    await other.started()
    first.heartbeat = m.Heartbeat()
    link = stack.coordinator._pool.links
    await until(lambda: link["v1"].connected, "v1 connected again")
    # It has no session here and the other one has one.
    stack.generate("xy", session_id="t", max_tokens=1)
    await first.started("t")
