"""A coordinator that is full: who waits, who is told to come back, and when."""

from collections.abc import AsyncIterator

import pytest

from coordinator.calls import TENANT
from outrider.errors import InvalidRequestError, OverloadedError
from outrider.pb.v1 import coordinator_pb2 as pb
from tests.support.coordinator_stack import EOS, Completion, Stack, running_stack, until


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_stack() as stack:
        yield stack


def ask(stack: Stack, session_id: str, tenant: str, n: int = 1) -> Completion:
    request = pb.GenerateRequest(session_id=session_id, text="ab", n=n)
    completion = Completion(stack.client.Generate(request, metadata=((TENANT, tenant),)))
    stack._exit_stack.push_async_callback(completion.cancel)
    return completion


async def test_a_request_waits_for_room_and_one_too_many_is_told_when_to_come_back(
    stack: Stack,
) -> None:
    coordinator = await stack.start_coordinator(max_queued=1)
    worker = await stack.add_verify(capacity=1)
    await stack.ready()
    first = stack.generate(session_id="first")
    start = await worker.started("first")
    second = stack.generate(session_id="second")
    await until(lambda: coordinator._admission.queued == 1, "a request that waits")
    with pytest.raises(OverloadedError, match="full") as refused:
        await stack.generate(session_id="third").end()
    assert (refused.value.retry_after_s or 0) > 0
    worker.say(worker.progress(start, [EOS]))
    await first.end()
    start = await worker.started("second")
    worker.say(worker.progress(start, [EOS]))
    await second.end()
    assert (coordinator._admission.running, coordinator._admission.queued) == (0, 0)


async def test_a_client_that_goes_leaves_the_queue(stack: Stack) -> None:
    coordinator = await stack.start_coordinator(max_queued=1)
    worker = await stack.add_verify(capacity=1)
    await stack.ready()
    first = stack.generate(session_id="first")
    await worker.started("first")
    second = stack.generate(session_id="second")
    await until(lambda: coordinator._admission.queued == 1, "a request that waits")
    await second.cancel()
    await until(lambda: coordinator._admission.queued == 0, "nobody waits")
    third = stack.generate(session_id="third")
    # The places of one that went are free too.
    await first.cancel()
    await worker.started("third")
    assert not [c for c in worker.commands if c.session_id == "second"]
    await third.cancel()
    await until(lambda: coordinator._admission.running == 0, "nobody runs")


async def test_tenants_have_limits_of_their_own(stack: Stack) -> None:
    coordinator = await stack.start_coordinator(tenant_sessions=2, queue_wait_s=0.2)
    worker = await stack.add_verify(capacity=8)
    await stack.ready()
    ask(stack, "a", "x", n=2)
    assert (await worker.started("a.1")).tenant == "x"
    with pytest.raises(OverloadedError, match=r"no room within 0\.2 s"):
        await ask(stack, "b", "x").end()
    ask(stack, "c", "y")
    assert (await worker.started("c")).tenant == "y"
    with pytest.raises(InvalidRequestError, match="more than the 2 sessions"):
        await ask(stack, "d", "z", n=3).end()
    assert coordinator._admission.running == 3
