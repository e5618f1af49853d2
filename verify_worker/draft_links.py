"""Streams to draft workers: the verify worker is their client.

One stream a draft worker, opened with the first command for it. A stream that breaks is
reported to the engine once and forgotten; the next command opens a fresh one.
"""

import asyncio
from collections.abc import Callable
from typing import TypeAlias

import grpc

from outrider import logs, rpc, wire
from outrider.errors import InvalidRequestError, OutriderError, UnavailableError
from outrider.messages import DraftCommand, DraftEvent, DraftWorkerRef
from outrider.pb.v1 import draft_pb2, draft_pb2_grpc
from verify_worker.engine import DrafterGone, FromDrafter, Message

SpeculateCall: TypeAlias = (
    "grpc.aio.StreamStreamCall[draft_pb2.SpeculateRequest, draft_pb2.SpeculateResponse]"
)

_LOG = logs.get(__name__)


class DraftLinks:
    """The streams of this worker; use it from its event loop only."""

    def __init__(self, post: Callable[[Message], None]) -> None:
        self._post = post
        self._links: dict[DraftWorkerRef, _Link] = {}

    def send(self, worker: DraftWorkerRef, command: DraftCommand) -> None:
        """Queue a command; a worker that can't be reached is reported as gone."""
        link = self._links.get(worker)
        if link is None:
            link = _Link(worker, self._post, self._forget)
            self._links[worker] = link
        link.commands.put_nowait(command)

    def _forget(self, worker: DraftWorkerRef) -> None:
        self._links.pop(worker, None)

    async def close(self) -> None:
        """End every stream."""
        links = list(self._links.values())
        for link in links:
            link.task.cancel()
        await asyncio.gather(*(link.task for link in links), return_exceptions=True)


class _Link:
    """One Speculate stream, run by one task until it breaks."""

    def __init__(
        self,
        worker: DraftWorkerRef,
        post: Callable[[Message], None],
        forget: Callable[[DraftWorkerRef], None],
    ) -> None:
        self.commands: asyncio.Queue[DraftCommand] = asyncio.Queue()
        self._worker = worker
        self._post = post
        self._forget = forget
        self.task = asyncio.create_task(self._run(), name=f"draft-link-{worker.worker_id}")

    async def _run(self) -> None:
        error: OutriderError
        try:
            await self._stream()
            error = UnavailableError(f"draft worker {self._worker.worker_id} ended the stream")
        except grpc.RpcError as failure:
            error = rpc.error_of(failure, self._worker.address)
        except OutriderError as failure:
            error = failure
        self._forget(self._worker)
        _LOG.warning("draft worker lost", worker_id=self._worker.worker_id, error=error.message)
        self._post(DrafterGone(self._worker.worker_id, error))

    async def _stream(self) -> None:
        async with rpc.open_channel(self._worker.address) as channel:
            stub = draft_pb2_grpc.DraftServiceStub(channel)
            call = stub.Speculate()  # type: ignore[call-arg]  # the hints want an iterator
            # grpc would leave an iterator of frames running when the call breaks.
            writer = asyncio.create_task(self._write(call))
            try:
                while isinstance(response := await call.read(), draft_pb2.SpeculateResponse):
                    for event in response.events:
                        self._post(FromDrafter(self._worker.worker_id, _read(event)))
            finally:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)

    async def _write(self, call: SpeculateCall) -> None:
        while True:
            commands = [await self.commands.get()]
            while not self.commands.empty():
                commands.append(self.commands.get_nowait())
            await call.write(
                draft_pb2.SpeculateRequest(
                    commands=[wire.draft_command_to_pb(command) for command in commands]
                )
            )


def _read(event: draft_pb2.DraftEvent) -> DraftEvent | OutriderError:
    try:
        return wire.draft_event_from_pb(event)
    except InvalidRequestError as error:
        return error
