"""The gRPC face of the verify worker: it only exchanges messages with the engine."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from outrider import rpc, wire
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


@dataclass(slots=True)
class Serving:
    """An engine that is up, and who is connected to it."""

    identity: Identity
    engine: Engine
    streams: Streams
    running: set[asyncio.Task[None]] = field(default_factory=set)


class VerifyServicer(verify_pb2_grpc.VerifyServiceServicer):
    """`outrider.v1.VerifyService`; it answers UNAVAILABLE while there is no engine."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._serving: Serving | None = None

    def serve_with(self, identity: Identity, engine: Engine, streams: Streams) -> None:
        """Take streams from now on."""
        self._serving = Serving(identity, engine, streams)

    async def leave(self, grace_s: float) -> None:
        """Take none any more, and end those that there are: after `grace_s` also unwritten."""
        left, self._serving = self._serving, None
        if left is None:
            return
        left.streams.end_all()
        if left.running:
            await asyncio.wait(left.running, timeout=grace_s)
        for task in left.running:
            task.cancel()
        # Whoever is still in one of them holds on to the engine and its model.
        await asyncio.gather(*left.running, return_exceptions=True)

    def _up(self) -> Serving:
        if self._serving is None:
            raise UnavailableError(f"verify worker {self._worker_id} loads its model")
        return self._serving

    async def Decode(  # type: ignore[override]  # noqa: N802 - the name of the rpc
        self,
        request_iterator: AsyncIterator[verify_pb2.DecodeRequest],
        context: Context,
    ) -> None:
        """Commands in, events out; the end of the stream closes its sessions."""
        async with rpc.errors_as_status(context):
            serving = self._up()
            carrying = asyncio.create_task(self._carry(serving, request_iterator, context))
            serving.running.add(carrying)
            try:
                await asyncio.shield(carrying)
            except asyncio.CancelledError:
                if not carrying.cancelled():
                    raise  # of the call, not of what it waits for
                raise UnavailableError(f"verify worker {self._worker_id} ends") from None
            finally:
                carrying.cancel()
                await asyncio.gather(carrying, return_exceptions=True)
                serving.running.discard(carrying)

    # It writes the frames itself: a generator that is cancelled while a frame is on its way is
    # cleaned up only when it is collected.
    async def _carry(
        self,
        serving: Serving,
        requests: AsyncIterator[verify_pb2.DecodeRequest],
        context: Context,
    ) -> None:
        streams = serving.streams
        number = streams.open()
        reader = asyncio.create_task(self._read(serving, number, requests))
        try:
            # The coordinator gives sessions to a worker that it has heard.
            await context.write(streams.frame())
            while (frame := await streams.next_frame(number)) is not None:
                await context.write(frame)
        finally:
            streams.close(number)
            serving.engine.post(OwnerGone(number))
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def GetWorkerState(  # noqa: N802 - the name of the rpc
        self, request: verify_pb2.GetWorkerStateRequest, context: Context
    ) -> verify_pb2.GetWorkerStateResponse:
        """What the worker holds; read between two steps or during one."""
        async with rpc.errors_as_status(context):
            serving = self._up()
        identity, scheduler = serving.identity, serving.engine.scheduler
        counters = scheduler.counters
        running = scheduler.running
        return verify_pb2.GetWorkerStateResponse(
            worker_id=identity.worker_id,
            incarnation=identity.incarnation,
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

    async def _read(
        self, serving: Serving, number: int, requests: AsyncIterator[verify_pb2.DecodeRequest]
    ) -> None:
        try:
            async for request in requests:
                for pb in request.commands:
                    self._accept(serving, number, pb)
        finally:
            # A coordinator that says no more is gone, or going.
            serving.streams.end(number)

    def _accept(self, serving: Serving, number: int, pb: verify_pb2.DecodeCommand) -> None:
        """Give a command to the engine; one that can't be taken fails alone."""
        try:
            command = wire.decode_command_from_pb(pb)
            if not command.session_id:
                raise InvalidRequestError("a decode command needs a session id")
            if serving.identity.draining and isinstance(command, StartSession):
                raise UnavailableError(f"verify worker {self._worker_id} is draining")
        except OutriderError as error:
            failed = SessionFailed(session_id=pb.session_id, epoch=pb.epoch, error=error)
            serving.streams.put(number, failed)
        else:
            serving.engine.post(FromCoordinator(number, command))
