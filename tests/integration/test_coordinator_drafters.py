"""Draft workers that go, come and misbehave, and which of them the sessions are given."""

from collections.abc import AsyncIterator

import pytest
from structlog.testing import capture_logs

from outrider import messages as m
from outrider.errors import InvalidRequestError, OutriderError, UnavailableError
from tests.support.coordinator_stack import (
    EOS,
    FakeVerifyWorker,
    Stack,
    running_stack,
    until,
    until_async,
)

RUBBISH = InvalidRequestError("draft worker d1 sent malformed drafts: a tree")


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_stack() as stack:
        yield stack


def lost(session_id: str, error: OutriderError) -> m.DrafterLost:
    return m.DrafterLost(session_id=session_id, epoch=1, worker_id="d1", error=error)


def assigned(worker: FakeVerifyWorker, session_id: str) -> list[str | None]:
    commands = worker.of(m.AssignDrafter, session_id)
    return [command.drafter and command.drafter.worker_id for command in commands]


async def begin(stack: Stack, worker: FakeVerifyWorker, session_id: str) -> str | None:
    """Start a session; the draft worker that it was given."""
    stack.generate(session_id=session_id)
    start = await worker.started(session_id)
    return start.drafter and start.drafter.worker_id


async def test_rubbish_shuts_a_draft_worker_out_for_every_session(stack: Stack) -> None:
    with capture_logs() as lines:
        await shut_out(stack)
    (said,) = [line for line in lines if line["event"] == "draft worker quarantined"]
    assert (said["worker_id"], said["incarnation"], said["why"]) == ("d1", "i1", RUBBISH.message)


async def shut_out(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    stack.add_draft("d1")
    await stack.ready()
    assert [await begin(stack, worker, name) for name in ("a", "b", "c")] == ["d1"] * 3
    worker.say(lost("a", RUBBISH), lost("b", RUBBISH))
    # One that had not noticed is taken away from it; the two others left by themselves.
    await until(lambda: assigned(worker, "c") == [None], "c has no draft worker")
    assert await begin(stack, worker, "new") is None

    async def recorded() -> bool:
        return (await stack.records.read("c"))[0].draft_worker_id == ""

    await until_async(recorded, "the record names no draft worker")
    # Started again it is another one.
    await stack.withdraw("d1")
    stack.add_draft("d1", incarnation="i2")
    for name in ("a", "b", "c", "new"):
        await until(lambda n=name: assigned(worker, n)[-1:] == ["d1"], f"{name} has d1 again")
    assert assigned(worker, "a") == ["d1"]


async def test_a_session_moves_from_a_bad_draft_worker_to_a_good_one(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    stack.add_draft("d1")
    await stack.ready()
    assert [await begin(stack, worker, name) for name in ("a", "b")] == ["d1", "d1"]
    stack.add_draft("d2")
    await stack.ready()
    worker.say(lost("a", RUBBISH))
    for name in ("a", "b"):
        await until(lambda n=name: assigned(worker, n) == ["d2"], f"{name} has d2")


async def test_a_draft_worker_that_was_lost_otherwise_is_not_shut_out(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    stack.add_draft("d1")
    await stack.ready()
    assert await begin(stack, worker, "a") == "d1"
    worker.say(lost("a", UnavailableError("went away")))

    async def given_up() -> bool:
        return (await stack.records.read("a"))[0].draft_worker_id == ""

    await until_async(given_up, "a has left d1")
    assert await begin(stack, worker, "b") == "d1"


async def test_a_lost_draft_worker_is_replaced(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    stack.add_draft("d1")
    stack.add_draft("d2")
    stack.add_draft("other", tokenizer_fingerprint="another")
    await stack.ready()
    done = stack.generate()
    start = await worker.started()
    assert start.drafter is not None
    assert start.drafter.worker_id == "d1"
    lost = m.DrafterLost(
        session_id="s", epoch=1, worker_id="d1", error=UnavailableError("went away")
    )
    worker.say(lost, lost)
    await until(lambda: assigned(worker, "s") == ["d2"], "d2 is assigned")
    assert worker.of(m.AssignDrafter)[0].epoch == 1

    async def recorded() -> bool:
        return (await stack.records.read("s"))[0].draft_worker_id == "d2"

    await until_async(recorded, "the record names d2")
    await stack.withdraw("d2")
    stack.add_draft("d3")
    await until(lambda: assigned(worker, "s") == ["d2", "d3"], "d3 is assigned")
    worker.say(worker.progress(start, [EOS]))
    await done.end()


async def test_a_draft_worker_that_comes_late_is_assigned(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    stack.generate()
    start = await worker.started()
    assert start.drafter is None
    off = stack.generate(
        session_id="off", speculation={"mode": "SPECULATION_MODE_OFF", "draft_len": 3}
    )
    plain = await worker.started("off")
    assert plain.speculation == m.SpeculationOptions(enabled=False, draft_len=3)
    stack.add_draft("d1")
    await until(lambda: assigned(worker, "s") == ["d1"], "d1 is assigned")
    worker.say(worker.progress(plain, [EOS]))
    await off.end()
    assert worker.of(m.AssignDrafter, "off") == []
