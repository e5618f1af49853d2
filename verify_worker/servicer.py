"""The gRPC face of the verify worker: it only exchanges messages with the engine."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc

from outrider import wire
from outrider.errors import InvalidRequestError, OutriderError, UnavailableError
from outrider.messages import SessionFailed, StartSession
from outrider.pb.v1 import verify_pb2, verify_pb2_grpc
from verify_worker.engine import Engine, FromCoordinator, OwnerGone
from verify_worker.streams import Streams

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(slots=True)
class Identity:
    """Who this worker is, and whether it is leaving."""

    worker_id: str
    incarnation: str
    draining: bool = False


class VerifyServicer(verify_pb2_grpc.VerifyServiceServicer):
    """`outrider.v1.VerifyService`."""

    def __init__(self, identity: Identity, engine: Engine, streams: Streams) -> None:
        self._identity = identity
        self._engine = engine
        self._streams = streams

    # It writes the frames itself: a generator that is cancelled while a frame is on its way is
    # cleaned up only when it is collected.
    async def Decode(  # type: ignore[override]  # noqa: N802 - the name of the rpc
        self,
        request_iterator: AsyncIterator[verify_pb2.DecodeRequest],
        context: Context,
    ) -> None:
        """Commands in, events out; the end of the stream closes its sessions."""
        number = self._streams.open()
        reader = asyncio.create_task(self._read(number, request_iterator))
        try:
            # The coordinator gives sessions to a worker that it has heard.
            await context.write(self._streams.frame())
            while (frame := await self._streams.next_frame(number)) is not None:
                await context.write(frame)
        finally:
            self._streams.close(number)
            self._engine.post(OwnerGone(number))
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def GetWorkerState(  # noqa: N802 - the name of the rpc
        self, request: verify_pb2.GetWorkerStateRequest, context: Context
    ) -> verify_pb2.GetWorkerStateResponse:
        """What the worker holds; read between two steps or during one."""
        scheduler = self._engine.scheduler
        counters = scheduler.counters
        running = scheduler.running
        return verify_pb2.GetWorkerStateResponse(
            worker_id=self._identity.worker_id,
            incarnation=self._identity.incarnation,
            total_blocks=scheduler.pool.total,
            free_blocks=scheduler.pool.free,
            running_sessions=running,
            waiting_sessions=len(scheduler.sessions) - running,
            speculation=wire.figures_to_pb(counters.speculation),
            stale_proposals=counters.stale_proposals,
            malformed_proposals=counters.malformed_proposals,
            cached_blocks=scheduler.pool.cached,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            rows=counters.rows,
        )

    async def _read(self, number: int, requests: AsyncIterator[verify_pb2.DecodeRequest]) -> None:
        try:
            async for request in requests:
                for pb in request.commands:
                    self._accept(number, pb)
        finally:
            # A coordinator that says no more is gone, or going.
            self._streams.end(number)

    def _accept(self, number: int, pb: verify_pb2.DecodeCommand) -> None:
        """Give a command to the engine; one that can't be taken fails alone."""
        try:
            command = wire.decode_command_from_pb(pb)
            if not command.session_id:
                raise InvalidRequestError("a decode command needs a session id")
            if self._identity.draining and isinstance(command, StartSession):
                raise UnavailableError(f"verify worker {self._identity.worker_id} is draining")
        except OutriderError as error:
            failed = SessionFailed(session_id=pb.session_id, epoch=pb.epoch, error=error)
            self._streams.put(number, failed)
        else:
            self._engine.post(FromCoordinator(number, command))
