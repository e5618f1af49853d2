"""Two groups with one Redis, whose models and tokenizers are the same: no worker is shared."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from outrider import messages as m
from outrider import rpc
from outrider.errors import NotFoundError, UnavailableError
from outrider.pb.v1 import coordinator_pb2 as pb
from outrider.session.prefixes import Holder, PrefixDirectory, published_prefixes
from tests.support.coordinator_stack import (
    MODEL,
    FakeVerifyWorker,
    Stack,
    running_stack,
    token_ids,
    until,
    until_async,
)

# Long enough for a prefix of whole blocks.
LONG = replace(MODEL, context_len=1024)
TEXT = "It begins like this, and goes on for a while. " * 5


@dataclass
class Group:
    name: str
    client: Any
    verify: FakeVerifyWorker

    async def shows(self, *worker_ids: str) -> None:
        """Wait until its coordinator shows and could use just these."""
        await until_async(lambda: self._shows({*worker_ids}), f"{worker_ids} up at {self.name}")

    async def _shows(self, worker_ids: set[str]) -> bool:
        status = await self.client.GetStatus(pb.GetStatusRequest())
        up = [w for w in status.workers if w.connected or w.pool == pb.WORKER_POOL_DRAFT]
        return {w.worker_id for w in status.workers} == {w.worker_id for w in up} == worker_ids

    async def drain(self, worker_id: str) -> None:
        with rpc.status_as_errors("the coordinator"):
            await self.client.DrainWorker(pb.DrainWorkerRequest(worker_id=worker_id, draining=True))


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_stack() as stack:
        yield stack


async def two_groups(stack: Stack) -> list[Group]:
    """`big` and `small`, each with a coordinator, a verify worker and a draft worker."""
    groups = []
    for name in ("big", "small"):
        verify = await stack.add_verify(f"v-{name}", group=name, kv_fingerprint="kv")
        stack.add_draft(f"d-{name}", group=name)
        await stack.start_coordinator(model=LONG, group=name, worker_id=f"c-{name}")
        groups.append(Group(name, stack.client, verify))
    for group in groups:
        await group.shows(f"v-{group.name}", f"d-{group.name}")
    return groups


async def begin(stack: Stack, group: Group, session_id: str) -> m.StartSession:
    """A session at the group's coordinator, on the group's verify worker."""
    stack.request(pb.GenerateRequest(session_id=session_id, text=TEXT), at=group.client)
    return await group.verify.started(session_id)


async def test_sessions_get_workers_of_their_own_group_only(stack: Stack) -> None:
    groups = await two_groups(stack)
    _, small = groups
    # What the other group has of a prefix is no reason to go there.
    hashes = [prefix.block_hash for prefix in published_prefixes("kv", token_ids(TEXT))]
    assert hashes
    await PrefixDirectory(stack.redis).change("kv", Holder("v-big", "i1"), held=hashes)
    for group in groups:
        for i in range(3):
            start = await begin(stack, group, f"{group.name}-{i}")
            assert start.drafter is not None
            assert start.drafter.worker_id == f"d-{group.name}"
    for group in groups:
        sessions = {start.session_id for start in group.verify.commands}
        assert sessions == {f"{group.name}-{i}" for i in range(3)}
    # One that loses its draft worker waits for one of the group, though the other's has room.
    await stack.withdraw("d-small")
    await small.shows("v-small")
    gone = UnavailableError("draft worker d-small is gone")
    small.verify.say(m.DrafterLost(session_id="small-0", epoch=1, worker_id="d-small", error=gone))

    async def noted() -> bool:
        return (await stack.records.read("small-0"))[0].draft_worker_id != "d-small"

    await until_async(noted, "the record says so")
    stack.add_draft("d-small-2", group="small")
    await until(lambda: bool(small.verify.of(m.AssignDrafter, "small-0")), "another one")
    (assigned,) = small.verify.of(m.AssignDrafter, "small-0")
    assert assigned.drafter.worker_id == "d-small-2"


async def test_sessions_move_and_workers_drain_within_their_group(stack: Stack) -> None:
    big, small = await two_groups(stack)
    await begin(stack, small, "s")
    with pytest.raises(NotFoundError, match=r"there are: d-small, v-small$"):
        await small.drain("v-big")
    await small.drain("v-small")
    # Only another one of the group takes what has to leave.
    another = await stack.add_verify("v-small-2", group="small")
    assert (await another.started("s")).epoch == 2
    assert not big.verify.commands
    assert not stack.announced["v-big"].draining
