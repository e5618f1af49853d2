"""DraftService on gRPC: one stream a verify worker, frames of many sessions."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from draft_worker.engine import Engine
from draft_worker.outbox import Outbox
from outrider import logs, rpc, wire
from outrider.errors import DeadlineError, InvalidRequestError, UnavailableError
from outrider.messages import DraftCommand, DraftFailed
from outrider.pb.v1 import draft_pb2, draft_pb2_grpc

# A peer that takes no frame for this long is stuck, though its connection is alive.
WRITE_TIMEOUT_S = 30.0


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """Carries commands to the engine and its events back, once there is an engine."""

    def __init__(self, worker_id: str, incarnation: str) -> None:
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._engine: Engine | None = None
        self._outboxes: set[Outbox] = set()
        self._log = logs.get(__name__)

    def serve_with(self, engine: Engine) -> None:
        """Take streams from now on."""
        self._engine = engine

    def end_streams(self) -> None:
        """Let every stream end once its last events are written."""
        for outbox in self._outboxes:
            outbox.close()

    # It writes frames itself: a generator that is cancelled while a frame is on its way is
    # cleaned up only when it is collected.
    async def Speculate(  # type: ignore[override]  # noqa: N802
        self,
        request_iterator: AsyncIterator[draft_pb2.SpeculateRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Draft for the sessions of one verify worker until either side ends the stream."""
        async with rpc.errors_as_status(context):
            if self._engine is None:
                raise UnavailableError("this draft worker still loads its model; try again later")
            await self._carry(self._engine, request_iterator, context)

    async def GetDraftWorkerState(  # noqa: N802 - the name of the rpc
        self,
        request: draft_pb2.GetDraftWorkerStateRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> draft_pb2.GetDraftWorkerStateResponse:
        """What the worker holds; nothing while it loads its model."""
        state = draft_pb2.GetDraftWorkerStateResponse(
            worker_id=self._worker_id, incarnation=self._incarnation
        )
        if self._engine is not None:
            figures = self._engine.figures
            state.sessions = figures.sessions
            state.free_blocks, state.total_blocks = self._engine.kv_blocks
            state.drafts, state.draft_tokens = figures.drafts, figures.draft_tokens
        return state

    async def _carry(
        self,
        engine: Engine,
        requests: AsyncIterator[draft_pb2.SpeculateRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        outbox = Outbox()
        stream = engine.open_stream(outbox.put_threadsafe)
        self._outboxes.add(outbox)
        self._log.info("stream opened", stream=stream, peer=context.peer())
        reader = asyncio.create_task(self._read(engine, stream, requests, outbox))
        try:
            while events := await outbox.take():
                frame = [wire.draft_event_to_pb(event) for event in events]
                await _write(context, draft_pb2.SpeculateResponse(events=frame))
            if outbox.error is not None:
                raise outbox.error
            if reader.done():
                # A fault of the reader is the call's; it ends otherwise where frames end.
                reader.result()
        finally:
            self._outboxes.discard(outbox)
            engine.close_stream(stream)
            self._log.info("stream closed", stream=stream)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(
        self,
        engine: Engine,
        stream: int,
        requests: AsyncIterator[draft_pb2.SpeculateRequest],
        outbox: Outbox,
    ) -> None:
        """Bring frames to the engine; the end of the frames is the end of the stream."""
        try:
            async for request in requests:
                engine.submit(stream, self._parse(request, outbox))
        finally:
            outbox.close()

    def _parse(self, request: draft_pb2.SpeculateRequest, outbox: Outbox) -> list[DraftCommand]:
        """The commands of a frame; malformed ones are answered at once, one by one."""
        commands: list[DraftCommand] = []
        for item in request.commands:
            try:
                commands.append(wire.draft_command_from_pb(item))
            except InvalidRequestError as error:
                failed = DraftFailed(session_id=item.session_id, epoch=item.epoch, error=error)
                outbox.put([failed])
        return commands


async def _write(
    context: grpc.aio.ServicerContext[Any, Any], frame: draft_pb2.SpeculateResponse
) -> None:
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await context.write(frame)
    except TimeoutError as error:
        raise DeadlineError("the stream's proposals are not read; it was ended") from error
