"""Streams to draft workers: the verify worker is their client.

One stream a draft worker, opened with the first command for it. A stream that breaks is
reported to the engine once and forgotten; the next command opens a fresh one. A draft worker
that says far more than it was asked is no better than one that sends rubbish.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import grpc

from outrider import logs, rpc, wire
from outrider.errors import InvalidRequestError, OutriderError, UnavailableError
from outrider.messages import CommitDraft, DraftCommand, DraftEvent, DraftWorkerRef, OpenDraft
from outrider.pb.v1 import draft_pb2, draft_pb2_grpc
from outrider.tls import TlsFiles
from verify_worker.engine import DrafterGone, FromDrafter, Message

SpeculateCall: TypeAlias = (
    "grpc.aio.StreamStreamCall[draft_pb2.SpeculateRequest, draft_pb2.SpeculateResponse]"
)

_LOG = logs.get(__name__)
# What a draft worker may say on a stream beyond the answers to what it was asked.
UNASKED_EVENTS = 1000
# Hidden states that wait to be written to a draft worker, which may be slow to read; commits
# beyond go without theirs.
FEATURE_BYTES = 8 * 1024 * 1024


class Credit:
    """What a draft worker may still say on one stream: an event for each command to answer."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._left = UNASKED_EVENTS

    def earn(self, command: DraftCommand) -> None:
        """Count a command; a close is not answered."""
        if isinstance(command, OpenDraft | CommitDraft):
            self._left += 1

    def spend(self, events: int) -> None:
        """Count the events of a frame, of which an empty one is not free either.

        Raises:
            InvalidRequestError: there are more than all the commands call for.
        """
        self._left -= max(events, 1)
        if self._left < 0:
            raise InvalidRequestError(
                f"draft worker {self._worker_id} sent more than {UNASKED_EVENTS} events that "
                "nobody asked for"
            )


class DraftLinks:
    """The streams of this worker; use it from its event loop only."""

    def __init__(self, post: Callable[[Message], None], tls: TlsFiles | None = None) -> None:
        self._post = post
        self._tls = tls
        self._links: dict[DraftWorkerRef, _Link] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def send(self, worker: DraftWorkerRef, command: DraftCommand) -> None:
        """Queue a command; a worker that can't be reached is reported as gone."""
        link = self._links.get(worker)
        if link is None:
            link = _Link(worker, self._post, self._forget, self._tls)
            self._links[worker] = link
        link.send(command)

    def leave(self, worker_id: str) -> None:
        """End the stream to a draft worker without a report; nothing more is read from it."""
        for worker in [worker for worker in self._links if worker.worker_id == worker_id]:
            task = self._links.pop(worker).task
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def _forget(self, worker: DraftWorkerRef) -> None:
        self._links.pop(worker, None)

    async def close(self) -> None:
        """End every stream."""
        for worker in list(self._links):
            self.leave(worker.worker_id)
        await asyncio.gather(*self._ending, return_exceptions=True)


class _Link:
    """One Speculate stream, run by one task until it breaks."""

    def __init__(
        self,
        worker: DraftWorkerRef,
        post: Callable[[Message], None],
        forget: Callable[[DraftWorkerRef], None],
        tls: TlsFiles | None,
    ) -> None:
        self._commands: asyncio.Queue[DraftCommand] = asyncio.Queue()
        self._feature_bytes = 0
        self._credit = Credit(worker.worker_id)
        self._worker = worker
        self._post = post
        self._forget = forget
        self._tls = tls
        self.task = asyncio.create_task(self._run(), name=f"draft-link-{worker.worker_id}")

    def send(self, command: DraftCommand) -> None:
        """Queue a command."""
        self._credit.earn(command)
        size = _feature_bytes(command)
        if size and self._feature_bytes + size > FEATURE_BYTES:
            command, size = _without_features(command), 0
        self._feature_bytes += size
        self._commands.put_nowait(command)

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
        async with rpc.open_channel(self._worker.address, self._tls) as channel:
            stub = draft_pb2_grpc.DraftServiceStub(channel)
            call = stub.Speculate()  # type: ignore[call-arg]  # the hints want an iterator
            # grpc would leave an iterator of frames running when the call breaks.
            writer = asyncio.create_task(self._write(call))
            try:
                while isinstance(response := await call.read(), draft_pb2.SpeculateResponse):
                    self._credit.spend(len(response.events))
                    for event in response.events:
                        self._post(FromDrafter(self._worker.worker_id, _read(event)))
            finally:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)

    async def _write(self, call: SpeculateCall) -> None:
        while True:
            commands = [await self._commands.get()]
            while not self._commands.empty():
                commands.append(self._commands.get_nowait())
            self._feature_bytes -= sum(map(_feature_bytes, commands))
            await call.write(
                draft_pb2.SpeculateRequest(
                    commands=[wire.draft_command_to_pb(command) for command in commands]
                )
            )


def _feature_bytes(command: DraftCommand) -> int:
    if not isinstance(command, CommitDraft):
        return 0
    return sum(len(tensor.data) for _, tensor in command.features or ())


def _without_features(command: DraftCommand) -> DraftCommand:
    return replace(command, features=()) if isinstance(command, CommitDraft) else command


def _read(event: draft_pb2.DraftEvent) -> DraftEvent | OutriderError:
    try:
        return wire.draft_event_from_pb(event)
    except InvalidRequestError as error:
        return error
