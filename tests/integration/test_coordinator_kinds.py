"""Verify workers that compute otherwise: same weights, another type or other numerics."""

from collections.abc import AsyncIterator

import pytest

from outrider import messages as m
from outrider.errors import NoVerifyWorkerError
from outrider.session.identity import ModelIdentity
from tests.support.coordinator_stack import (
    EOS,
    Completion,
    FakeVerifyWorker,
    Stack,
    running_stack,
    token_ids,
)


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_stack() as stack:
        yield stack


async def begin(stack: Stack, worker: FakeVerifyWorker) -> Completion:
    """A session on `worker` that has shown "x"."""
    done = stack.generate("ab")
    start = await worker.started()
    worker.say(worker.progress(start, "x"))
    await done.shows("x")
    return done


async def finish(worker: FakeVerifyWorker, start: m.StartSession, done: Completion) -> None:
    """Bring it to its end with "y" after what `start` had."""
    worker.say(worker.progress(start, [*token_ids("y"), EOS]))
    await done.end()


async def test_a_session_stays_with_its_kind(stack: Stack) -> None:
    await stack.start_coordinator()
    first = await stack.add_verify("v1")
    await stack.ready()
    done = await begin(stack, first)
    others = [
        await stack.add_verify("v0", dtype="bfloat16"),
        await stack.add_verify("v2", numerics="invariant"),
    ]
    await stack.ready()
    second = stack.generate(session_id="second")
    await first.started("second")  # though the others have nothing to do
    await second.cancel()
    await stack.withdraw("v1")
    await first.server.stop(0)
    # New sessions are for those that are there, once nobody computes like the first.
    new = stack.generate(session_id="new")
    start = await others[0].started("new")
    await finish(others[0], start, new)
    # The one that runs waits for its own kind.
    assert not others[0].of(m.StartSession) + others[1].of(m.StartSession)
    alike = await stack.add_verify("v3")
    again = await alike.started()
    assert (again.epoch, again.token_ids) == (2, tuple(token_ids("abx")))
    await finish(alike, again, done)
    assert done.token_ids == [*token_ids("xy"), EOS]
    assert len(others[0].of(m.StartSession, "new")) == 1
    targets = {sid: (await stack.records.read(sid))[0].target for sid in ("s", "new")}
    assert targets["s"] == ModelIdentity("target-1", "float32", "fast")
    assert targets["new"] == ModelIdentity("target-1", "bfloat16", "fast")


async def test_without_another_of_its_kind_a_session_fails(stack: Stack) -> None:
    await stack.start_coordinator(replace_wait_s=0.2)
    first = await stack.add_verify("v1")
    await stack.ready()
    done = await begin(stack, first)
    other = await stack.add_verify("v2", dtype="bfloat16", model="smol")
    await stack.ready()
    await first.server.stop(0)
    said = r"no verify worker with bytes in float32/fast .*smol in bfloat16/fast.*--dtype float32"
    with pytest.raises(NoVerifyWorkerError, match=said):
        await done.end()
    assert done.text == "x"
    assert not other.commands
