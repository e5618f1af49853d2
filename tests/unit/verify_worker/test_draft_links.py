"""Links to draft workers against real servers that behave badly."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from outrider import rpc, wire
from outrider.errors import InvalidRequestError
from outrider.messages import CloseDraft, CommitDraft, Draft, DraftWorkerRef, Proposal, Tensor
from outrider.pb.v1 import draft_pb2, draft_pb2_grpc
from verify_worker.draft_links import FEATURE_BYTES, UNASKED_EVENTS, Credit, DraftLinks
from verify_worker.engine import DrafterGone, FromDrafter, Message
from verify_worker.state import LeaveDrafter, ToDrafter
from verify_worker.streams import Streams, deliver


class Aborting(draft_pb2_grpc.DraftServiceServicer):
    async def Speculate(self, requests: Any, context: Any) -> None:  # noqa: N802 - the rpc's name
        await context.abort(grpc.StatusCode.INTERNAL, "no")


async def reported_gone(address: str, times: int) -> None:
    messages: asyncio.Queue[Message] = asyncio.Queue()
    links = DraftLinks(messages.put_nowait)
    for _ in range(times):
        links.send(DraftWorkerRef("d1", address), CloseDraft(session_id="s", epoch=1))
        assert isinstance(await messages.get(), DrafterGone)
    await links.close()


@pytest.mark.parametrize("listens", [True, False])
async def test_a_stream_that_breaks_leaves_nothing_behind(listens: bool) -> None:
    complaints: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    server = rpc.Server()
    draft_pb2_grpc.add_DraftServiceServicer_to_server(Aborting(), server.grpc)
    port = await server.start("outrider.v1.DraftService", "127.0.0.1", 0)
    await reported_gone(f"127.0.0.1:{port if listens else 1}", times=5)
    gc.collect()
    await asyncio.sleep(0.1)
    await server.stop(0)
    assert complaints == []


CLOSE = CloseDraft(session_id="s", epoch=1)
COMMIT = CommitDraft(session_id="s", epoch=1, base_len=1, token_ids=(1,), draft_len=2)


def frame(events: int) -> draft_pb2.SpeculateResponse:
    proposal = wire.draft_event_to_pb(
        Proposal(session_id="s", epoch=9, base_len=1, draft=Draft((1,)))
    )
    return draft_pb2.SpeculateResponse(events=[proposal] * events)


class Talking(draft_pb2_grpc.DraftServiceServicer):
    """Answers each command with a frame of `events`, or never stops once it was spoken to."""

    def __init__(self, events: int, *, flood: bool) -> None:
        self.streams = 0
        self.ended = asyncio.Event()
        self.features: list[int] = []
        self._frame = frame(events)
        self._flood = flood

    async def Speculate(self, requests: Any, context: Any) -> None:  # noqa: N802 - the rpc's name
        self.streams += 1
        try:
            async for request in requests:
                for command in request.commands:
                    self.features.append(len(command.commit.features.layers))
                    await context.write(self._frame)
                while self._flood:
                    await context.write(self._frame)
        finally:
            self.ended.set()


@asynccontextmanager
async def talking(
    events: int, *, flood: bool = False
) -> AsyncIterator[tuple[Talking, DraftWorkerRef, DraftLinks, "asyncio.Queue[Message]"]]:
    server, servicer = rpc.Server(), Talking(events, flood=flood)
    draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server.grpc)
    port = await server.start("outrider.v1.DraftService", "127.0.0.1", 0)
    messages: asyncio.Queue[Message] = asyncio.Queue()
    links = DraftLinks(messages.put_nowait)
    yield servicer, DraftWorkerRef("d1", f"127.0.0.1:{port}"), links, messages
    await links.close()
    await server.stop(0)


@pytest.mark.parametrize("events", [0, 1, 300, 2 * UNASKED_EVENTS])
async def test_a_draft_worker_that_floods_is_left_and_reported_as_malformed(events: int) -> None:
    async with talking(events, flood=True) as (servicer, worker, links, messages):
        links.send(worker, COMMIT)
        heard = 0
        while isinstance(message := await messages.get(), FromDrafter):
            heard += 1
        assert heard <= UNASKED_EVENTS + 1
        assert isinstance(message, DrafterGone)
        assert isinstance(message.error, InvalidRequestError)
        assert "d1 sent more than 1000 events" in message.error.message
        await servicer.ended.wait()
        assert messages.empty()


async def test_as_many_answers_as_were_asked_for_are_heard() -> None:
    many = 3 * UNASKED_EVENTS
    async with talking(1) as (servicer, worker, links, messages):
        for _ in range(many):
            links.send(worker, COMMIT)
        for _ in range(many):
            assert isinstance(await messages.get(), FromDrafter)
        assert servicer.streams == 1


def test_credit() -> None:
    credit = Credit("d1")
    credit.earn(COMMIT)
    credit.earn(CLOSE)
    credit.spend(UNASKED_EVENTS)
    credit.spend(1)
    with pytest.raises(InvalidRequestError, match="d1"):
        credit.spend(0)


async def test_a_stream_that_is_left_ends_without_a_report() -> None:
    async with talking(1) as (servicer, worker, links, messages):
        deliver([ToDrafter(worker, COMMIT)], Streams(), links)
        assert isinstance(await messages.get(), FromDrafter)
        deliver([LeaveDrafter("d2"), LeaveDrafter("d1")], Streams(), links)
        await servicer.ended.wait()
        # It can be used again, on a stream of its own.
        links.send(worker, COMMIT)
        assert isinstance(await messages.get(), FromDrafter)
        assert servicer.streams == 2
        assert messages.empty()


async def test_hidden_states_that_pile_up_are_left_out() -> None:
    big = Tensor("bfloat16", (1, FEATURE_BYTES // 8), bytes(FEATURE_BYTES // 4))
    commit = CommitDraft(
        session_id="s", epoch=1, base_len=1, token_ids=(1,), draft_len=2, features=((30, big),)
    )
    async with talking(1) as (servicer, worker, links, messages):
        for _ in range(2):
            # Nothing is written in between.
            for _ in range(7):
                links.send(worker, commit)
            for _ in range(7):
                assert isinstance(await messages.get(), FromDrafter)
        assert servicer.features == 2 * [1, 1, 1, 1, 0, 0, 0]
