"""The acceptance rule and speculation: what requests, the policy and trust make of them."""

from collections.abc import AsyncIterator

import pytest

from outrider import messages as m
from outrider.errors import ConfigError, UnavailableError
from outrider.pb.v1 import coordinator_pb2 as pb
from outrider.pb.v1 import types_pb2
from outrider.session.policy import Policy, PolicyStore
from tests.support.coordinator_stack import (
    FakeVerifyWorker,
    Stack,
    running_stack,
    until,
    until_async,
)

COUPLED, REJECTION = m.AcceptanceRule.COUPLED, m.AcceptanceRule.REJECTION
ASK_REJECTION = types_pb2.SpeculationOptions(rule=types_pb2.ACCEPTANCE_RULE_REJECTION)


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_stack() as stack:
        yield stack


def assigned(worker: FakeVerifyWorker, session_id: str) -> list[m.DraftWorkerRef | None]:
    return [command.drafter for command in worker.of(m.AssignDrafter, session_id)]


async def gone(stack: Stack, worker_id: str) -> None:
    """Take a draft worker out of the registry and wait until the coordinator knows it."""
    await stack.withdraw(worker_id)

    async def unknown() -> bool:
        status = await stack.client.GetStatus(pb.GetStatusRequest())
        return worker_id not in {worker.worker_id for worker in status.workers}

    await until_async(unknown, f"{worker_id} is gone")


async def policy_is(stack: Stack, policy: Policy) -> None:
    await until(lambda: stack.coordinator._policy.value == policy, f"{policy} is read")


async def test_rejection_is_refused_without_a_trusted_draft_worker(stack: Stack) -> None:
    await stack.start_coordinator(trust_draft_worker=("elsewhere",))
    worker = await stack.add_verify()
    stack.add_draft("d1")
    await stack.ready()
    with pytest.raises(ConfigError, match="--trust-draft-worker"):
        await stack.generate(speculation=ASK_REJECTION).end()
    assert worker.commands == []
    # It is free to do without drafts, and coupled drafts need no trust.
    plain = types_pb2.SpeculationOptions(
        mode=types_pb2.SPECULATION_MODE_OFF, rule=types_pb2.ACCEPTANCE_RULE_REJECTION
    )
    stack.generate(session_id="plain", speculation=plain)
    start = await worker.started("plain")
    assert (start.speculation.rule, start.drafter) == (REJECTION, None)
    stack.generate(session_id="coupled")
    start = await worker.started("coupled")
    assert start.speculation.rule is COUPLED
    assert start.drafter == m.DraftWorkerRef("d1", "d1:1", trusted=False)


async def test_rejection_only_ever_gets_trusted_draft_workers(stack: Stack) -> None:
    await stack.start_coordinator(trust_draft_worker=("d2", "d4"))
    worker = await stack.add_verify()
    for name in ("d1", "d2", "d3"):
        stack.add_draft(name)
    await stack.ready()
    stack.generate(speculation=ASK_REJECTION)
    start = await worker.started()
    assert start.speculation.rule is REJECTION
    assert start.drafter == m.DraftWorkerRef("d2", "d2:1", trusted=True)
    lost = m.DrafterLost(
        session_id="s", epoch=1, worker_id="d2", error=UnavailableError("went away")
    )
    await gone(stack, "d2")
    worker.say(lost)

    async def goes_on_plainly() -> bool:
        return (await stack.records.read("s"))[0].draft_worker_id == ""

    await until_async(goes_on_plainly, "the record names no draft worker")
    # Others are up all the time; the next one that is taken is the next trusted one.
    stack.add_draft("d4")
    await until(lambda: bool(assigned(worker, "s")), "another draft worker is assigned")
    assert assigned(worker, "s") == [m.DraftWorkerRef("d4", "d4:1", trusted=True)]


async def test_all_trusts_every_draft_worker(stack: Stack) -> None:
    await stack.start_coordinator(trust_draft_worker=("all",))
    worker = await stack.add_verify()
    stack.add_draft("d1")
    await stack.ready()
    stack.generate(speculation=ASK_REJECTION)
    start = await worker.started()
    assert start.drafter == m.DraftWorkerRef("d1", "d1:1", trusted=True)


async def test_policy_decides_what_requests_leave_open(stack: Stack) -> None:
    await stack.start_coordinator(trust_draft_worker=("d1",))
    worker = await stack.add_verify()
    stack.add_draft("d1")
    await stack.ready()
    store = PolicyStore(stack.redis)
    await store.change(rule=REJECTION)
    await policy_is(stack, Policy(1, REJECTION))
    stack.generate(session_id="open")
    assert (await worker.started("open")).speculation == m.SpeculationOptions(rule=REJECTION)
    asks = types_pb2.SpeculationOptions(rule=types_pb2.ACCEPTANCE_RULE_COUPLED)
    stack.generate(session_id="asks", speculation=asks)
    assert (await worker.started("asks")).speculation.rule is COUPLED
    # Nobody to trust any more: requests that left it open go on with the coupled rule.
    await gone(stack, "d1")
    stack.generate(session_id="fallback")
    assert (await worker.started("fallback")).speculation.rule is COUPLED
    await store.change(speculation=False)
    await policy_is(stack, Policy(2, REJECTION, speculation=False))
    stack.generate(session_id="off")
    off = await worker.started("off")
    assert (off.speculation.enabled, off.drafter) == (False, None)
    on = types_pb2.SpeculationOptions(mode=types_pb2.SPECULATION_MODE_ON)
    stack.generate(session_id="on", speculation=on)
    assert (await worker.started("on")).speculation.enabled
