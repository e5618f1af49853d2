"""One completion as a stream of chunks, synchronous and asynchronous.

Both classes keep the same promises: iterating yields chunks, `complete` (one completion) and
`complete_all` (any number) wait for the rest. When the stream breaks, iterating goes on with
another one, at any coordinator, and nothing is lost or doubled. A caller that leaves early (break,
close, an exception, the end of the `with` block) cancels the session.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Self, TypeAlias

import grpc

from outrider._coordinators import AsyncCoordinators, Coordinators
from outrider._following import Following, check_single
from outrider._protocol import GenerateOptions
from outrider._retry import Retry
from outrider._values import Chunk, Completion
from outrider.errors import UnavailableError
from outrider.pb.v1 import coordinator_pb2 as pb

Call: TypeAlias = "grpc.CallIterator[pb.GenerateResponse] | grpc.CallIterator[pb.ResumeResponse]"
AsyncCall: TypeAlias = (
    "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]"
    " | grpc.aio.UnaryStreamCall[pb.ResumeRequest, pb.ResumeResponse]"
)
RESPONSES = (pb.GenerateResponse, pb.ResumeResponse)


class Generation(Following):
    """A running completion; iterate over it for chunks, or take all of it with `complete`."""

    def __init__(
        self,
        coordinators: Coordinators,
        retry: Retry,
        prompt: str | None,
        options: GenerateOptions,
    ) -> None:
        super().__init__(coordinators.directory, coordinators.metadata, retry, prompt, options)
        self._coordinators = coordinators
        # `cancel` may come from another thread at any time.
        self._lock = threading.Lock()
        self._left = threading.Event()
        self._call: Call | None = None
        coordinators.follow(self)
        with suppress(UnavailableError):  # a name without an address; iterating tries again
            self._open()

    def __iter__(self) -> Iterator[Chunk]:
        """Yield chunks until the end; leaving the loop early cancels the session.

        Raises:
            OutriderError: the completion failed, or no coordinator went on with it for too
                long; what was yielded before is valid.
        """
        try:
            while not self._closed:
                failure: grpc.RpcError | UnavailableError
                try:
                    yield from self._chunks()
                    return
                except (grpc.RpcError, UnavailableError) as error:
                    failure = error
                self._call = None
                if self._closed or self._left.wait(self._pause_s(failure)):
                    return
        finally:
            self.cancel()

    def complete(self) -> Completion:
        """Wait for the rest and return all of it.

        After a cancel it is what had arrived until then, with the reason CANCELLED.

        Raises:
            InvalidRequestError: there are several; see `complete_all`.
            OutriderError: as in iterating.
        """
        check_single(self._transcript.n)
        return self.complete_all()[0]

    def complete_all(self) -> list[Completion]:
        """Wait for the rest of every completion and return them in the order of their index.

        Raises:
            OutriderError: as in iterating.
        """
        for _ in self:
            pass
        return self._results()

    def cancel(self) -> None:
        """Cancel the session if it still runs; does nothing afterwards."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            call = self._call
        self._left.set()
        if self._may_run_on:
            self._coordinators.cancel_soon(self.session_id)
        if call is not None:
            end: Callable[[], object] = call.cancel
            end()
        self._span.end()

    close = cancel

    def _open(self) -> None:
        """Make the next call, to the coordinator that is likeliest to answer."""
        self._coordinators.look_up()
        endpoint = self._directory.first()
        stub = self._coordinators.stub(endpoint)
        with self._lock:
            if self._closed:
                return
            request = self._next_request(endpoint)
            timeout_s, metadata = self._attempts.remaining_s, self._metadata
            if isinstance(request, pb.ResumeRequest):
                self._call = stub.Resume(request, timeout=timeout_s, metadata=metadata)
            else:
                self._call = stub.Generate(request, timeout=timeout_s, metadata=metadata)

    def _chunks(self) -> Iterator[Chunk]:
        """What one call brings, to its end."""
        if self._call is None:
            self._open()
        call = self._call
        if call is not None:
            for response in call:
                chunk = self._feed(response)
                if chunk is not None:
                    yield chunk
            self._check_finished()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()


class AsyncGeneration(Following):
    """A running completion; iterate over it for chunks, or take all of it with `complete`."""

    def __init__(
        self,
        coordinators: AsyncCoordinators,
        retry: Retry,
        prompt: str | None,
        options: GenerateOptions,
    ) -> None:
        super().__init__(coordinators.directory, coordinators.metadata, retry, prompt, options)
        self._coordinators = coordinators
        self._left = asyncio.Event()
        self._call: AsyncCall | None = None
        coordinators.follow(self)
        # A name has to be looked up first, which is waited for at the first step of a loop.
        if not self._directory.to_resolve() and self._directory.endpoints():
            self._open()

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """Yield chunks until the end; leaving the loop early cancels the session.

        Raises:
            OutriderError: the completion failed, or no coordinator went on with it for too
                long; what was yielded before is valid.
        """
        try:
            while not self._closed:
                failure: grpc.RpcError | UnavailableError
                try:
                    call = await self._current_call()
                    if call is None:
                        return
                    # `read` gives grpc.aio.EOF, which is no message, at the end.
                    while isinstance(said := await call.read(), RESPONSES):
                        chunk = self._feed(said)
                        if chunk is not None:
                            yield chunk
                    self._check_finished()
                    return
                except (grpc.RpcError, UnavailableError) as error:
                    failure = error
                self._call = None
                if self._closed or await self._left_within(self._pause_s(failure)):
                    return
        except asyncio.CancelledError:
            # grpc raises this both for our own cancel and for that of the caller's task.
            task = asyncio.current_task()
            if not self._closed or (task is not None and task.cancelling()):
                raise
        finally:
            self.cancel()

    async def complete(self) -> Completion:
        """Wait for the rest and return all of it.

        After a cancel it is what had arrived until then, with the reason CANCELLED.

        Raises:
            InvalidRequestError: there are several; see `complete_all`.
            OutriderError: as in iterating.
        """
        check_single(self._transcript.n)
        return (await self.complete_all())[0]

    async def complete_all(self) -> list[Completion]:
        """Wait for the rest of every completion and return them in the order of their index.

        Raises:
            OutriderError: as in iterating.
        """
        async for _ in self:
            pass
        return self._results()

    def cancel(self) -> None:
        """Cancel the session if it still runs; does nothing afterwards."""
        if self._closed:
            return
        self._closed = True
        self._left.set()
        if self._may_run_on:
            self._coordinators.cancel_soon(self.session_id)
        if self._call is not None:
            self._call.cancel()
        self._span.end()

    def _open(self) -> None:
        """Make the next call, to the coordinator that is likeliest to answer."""
        endpoint = self._directory.first()
        stub = self._coordinators.stub(endpoint)
        request = self._next_request(endpoint)
        timeout_s, metadata = self._attempts.remaining_s, self._metadata
        if isinstance(request, pb.ResumeRequest):
            self._call = stub.Resume(request, timeout=timeout_s, metadata=metadata)
        else:
            self._call = stub.Generate(request, timeout=timeout_s, metadata=metadata)

    async def _current_call(self) -> "AsyncCall | None":
        """The call that runs, or the next one; None once the caller has cancelled."""
        if self._call is None:
            await self._coordinators.look_up()
            if not self._closed:
                self._open()
        return self._call

    async def _left_within(self, pause_s: float) -> bool:
        """Wait so long, or until the caller has cancelled; whether it has."""
        try:
            async with asyncio.timeout(pause_s):
                return await self._left.wait()
        except TimeoutError:
            return False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()
