import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

import draft_worker.servicer
from draft_worker.engine import Engine
from draft_worker.servicer import DraftServicer
from outrider import wire
from outrider.drafting.ngram import NgramDrafter
from outrider.errors import UnavailableError
from outrider.messages import OpenDraft, SamplingParams
from outrider.pb.v1 import draft_pb2, draft_pb2_grpc
from outrider.rpc import Server, open_channel, status_as_errors

DEADLINE_S = 30


@pytest.fixture
def servicer() -> DraftServicer:
    return DraftServicer("d", "i")


@pytest.fixture
async def stub(
    servicer: DraftServicer,
) -> AsyncIterator["draft_pb2_grpc.DraftServiceAsyncStub"]:
    server = Server()
    draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server.grpc)
    port = await server.start("outrider.v1.DraftService", "127.0.0.1", 0)
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield draft_pb2_grpc.DraftServiceStub(channel)
    await server.stop(0)


@pytest.fixture
async def engine(servicer: DraftServicer) -> AsyncIterator[Engine]:
    engine = Engine(NgramDrafter(), max_sessions=8)
    engine.start()
    servicer.serve_with(engine)
    yield engine
    await asyncio.to_thread(engine.stop)


def opened(epoch: int) -> draft_pb2.DraftCommand:
    tokens = tuple(range(60)) * 2
    command = OpenDraft(
        session_id="s", epoch=epoch, token_ids=tokens, sampling=SamplingParams(), draft_len=60
    )
    return wire.draft_command_to_pb(command)


async def no_sessions(engine: Engine) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if engine.figures.sessions == 0:
                return
            await asyncio.sleep(0.01)


async def test_before_the_model_is_loaded_streams_are_unavailable(
    stub: "draft_pb2_grpc.DraftServiceAsyncStub",
) -> None:
    with pytest.raises(UnavailableError, match="loads"), status_as_errors("the worker"):
        await stub.Speculate().read()


async def test_a_peer_that_is_done_writing_ends_its_stream(
    stub: "draft_pb2_grpc.DraftServiceAsyncStub", engine: Engine
) -> None:
    call = stub.Speculate()
    await call.write(draft_pb2.SpeculateRequest(commands=[opened(1)]))
    assert await call.read() is not grpc.aio.EOF
    assert engine.figures.sessions == 1
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    await no_sessions(engine)


async def test_a_peer_that_does_not_read_loses_its_stream(
    stub: "draft_pb2_grpc.DraftServiceAsyncStub", engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_worker.servicer, "WRITE_TIMEOUT_S", 0.2)
    call = stub.Speculate()
    await call.write(draft_pb2.SpeculateRequest(commands=[opened(1)]))
    assert await call.read() is not grpc.aio.EOF
    assert engine.figures.sessions == 1

    async def shout() -> None:
        # Each is answered with its long id: more than any window of flow control holds.
        malformed = draft_pb2.DraftCommand(session_id="x" * 100_000)
        while True:
            await call.write(draft_pb2.SpeculateRequest(commands=[malformed]))

    shouting = asyncio.create_task(shout())
    await no_sessions(engine)
    shouting.cancel()
    await asyncio.gather(shouting, return_exceptions=True)
