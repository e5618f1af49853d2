"""Links to draft workers against real servers that behave badly."""

import asyncio
import gc
from typing import Any

import grpc
import pytest

from outrider import rpc
from outrider.messages import CloseDraft, DraftWorkerRef
from outrider.pb.v1 import draft_pb2_grpc
from verify_worker.draft_links import DraftLinks
from verify_worker.engine import DrafterGone, Message


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
