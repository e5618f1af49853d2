"""One running `Generate` call as a stream of chunks, synchronous and asynchronous.

Both classes keep the same promises: iterating yields chunks, `complete` (one completion) and
`complete_all` (any number) wait for the rest, and a caller that leaves early (break, close,
an exception, the end of the `with` block) cancels the call, which frees its sessions at once.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_status import rpc_status
from opentelemetry import trace

from outrider import rpc, telemetry
from outrider._protocol import GenerateOptions, generate_request
from outrider._transcript import Transcript
from outrider._values import Chunk, Completion
from outrider.errors import InternalError, InvalidRequestError, OutriderError, UnavailableError
from outrider.pb.v1 import coordinator_pb2 as pb


def call_error(error: grpc.RpcError, address: str, *, answered: bool = False) -> OutriderError:
    """The error of a failed call to the coordinator; says what to start when nothing answers.

    `answered`: it had said something before.
    """
    found = rpc.error_of(error, address)
    from_server = rpc_status.from_call(error) is not None  # type: ignore[arg-type]  # see rpc.py
    if isinstance(found, UnavailableError) and not from_server:
        if answered:
            return UnavailableError(f"lost the connection to the coordinator at {address}")
        return UnavailableError(
            f"nothing answers at {address}: is a coordinator running there? "
            "`outrider up` starts everything on this machine"
        )
    return found


def check_single(n: int) -> None:
    """Refuse to give several completions as one with an `InvalidRequestError`."""
    if n > 1:
        raise InvalidRequestError(f"there are n={n} completions; use complete_all to get them")


class _Generation:
    """What both kinds of stream share: the request, the transcript and the span."""

    def __init__(self, address: str, prompt: str | None, options: GenerateOptions) -> None:
        arguments: dict[str, Any] = {**options}
        self._timeout_s: float | None = arguments.pop("timeout_s", None)
        session_id = arguments.pop("session_id", "") or uuid.uuid4().hex
        self._request = generate_request(prompt, session_id=session_id, **arguments)
        self._address = address
        self._transcript = Transcript(session_id, self._request.n)
        self._error: OutriderError | None = None
        self._closed = False
        self._span = telemetry.tracer(__name__).start_span(
            "outrider.generate",
            kind=trace.SpanKind.CLIENT,
            attributes={"outrider.session_id": session_id, "server.address": address},
        )

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        parent = telemetry.traceparent(trace.set_span_in_context(self._span))
        return (("traceparent", parent),) if parent else ()

    @property
    def session_id(self) -> str:
        """The id of the session; known from the start."""
        return self._transcript.session_id

    @property
    def prompt_text(self) -> str:
        """The prompt that was sent back (`echo`); known once the first chunk is there."""
        return self._transcript.prompt_text

    def _call_failed(self, error: grpc.RpcError) -> OutriderError:
        return self._fail(call_error(error, self._address, answered=self._transcript.begun))

    def _fail(self, error: OutriderError) -> OutriderError:
        self._error = error
        self._span.record_exception(error)
        self._span.set_status(trace.StatusCode.ERROR, error.message)
        return error

    def _check_finished(self) -> None:
        if not self._transcript.finished and not self._closed:
            raise self._fail(InternalError(f"the stream from {self._address} ended too early"))

    def _close(self, cancel: Callable[[], object]) -> None:
        if self._closed:
            return
        self._closed = True
        cancel()
        self._span.end()

    def _check_single(self) -> None:
        check_single(self._transcript.n)

    def _results(self) -> list[Completion]:
        if self._error is not None:
            raise self._error
        return self._transcript.completions()


class Generation(_Generation):
    """A running completion; iterate over it for chunks, or take all of it with `complete`."""

    def __init__(
        self,
        start: "grpc.UnaryStreamMultiCallable[pb.GenerateRequest, pb.GenerateResponse]",
        address: str,
        prompt: str | None,
        options: GenerateOptions,
    ) -> None:
        super().__init__(address, prompt, options)
        self._call = start(self._request, timeout=self._timeout_s, metadata=self._metadata())

    def __iter__(self) -> Iterator[Chunk]:
        """Yield chunks until the end; leaving the loop early cancels the call.

        Raises:
            OutriderError: the call failed; what was yielded before is valid.
        """
        if self._closed:
            return
        try:
            for response in self._call:
                chunk = self._transcript.feed(response)
                if chunk is not None:
                    yield chunk
            self._check_finished()
        except grpc.RpcError as error:
            if not self._closed:  # else our own cancel, which is no failure
                raise self._call_failed(error) from error
        except InternalError as error:
            raise self._fail(error) from None
        finally:
            self.cancel()

    def complete(self) -> Completion:
        """Wait for the rest and return all of it.

        After a cancel it is what had arrived until then, with the reason CANCELLED.

        Raises:
            InvalidRequestError: there are several; see `complete_all`.
            OutriderError: the call failed.
        """
        self._check_single()
        return self.complete_all()[0]

    def complete_all(self) -> list[Completion]:
        """Wait for the rest of every completion and return them in the order of their index.

        Raises:
            OutriderError: the call failed.
        """
        for _ in self:
            pass
        return self._results()

    def cancel(self) -> None:
        """End the call if it still runs; does nothing afterwards."""
        self._close(self._call.cancel)

    close = cancel

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()


class AsyncGeneration(_Generation):
    """A running completion; iterate over it for chunks, or take all of it with `complete`."""

    def __init__(
        self,
        start: "grpc.aio.UnaryStreamMultiCallable[pb.GenerateRequest, pb.GenerateResponse]",
        address: str,
        prompt: str | None,
        options: GenerateOptions,
    ) -> None:
        super().__init__(address, prompt, options)
        self._call = start(self._request, timeout=self._timeout_s, metadata=self._metadata())

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """Yield chunks until the end; leaving the loop early cancels the call.

        Raises:
            OutriderError: the call failed; what was yielded before is valid.
        """
        if self._closed:
            return
        try:
            # `read` gives grpc.aio.EOF, which is no message, at the end.
            while isinstance(response := await self._call.read(), pb.GenerateResponse):
                chunk = self._transcript.feed(response)
                if chunk is not None:
                    yield chunk
            self._check_finished()
        except asyncio.CancelledError:
            # grpc raises this both for our own cancel and for that of the caller's task.
            task = asyncio.current_task()
            if not self._closed or (task is not None and task.cancelling()):
                raise
        except grpc.RpcError as error:
            if not self._closed:
                raise self._call_failed(error) from error
        except InternalError as error:
            raise self._fail(error) from None
        finally:
            self.cancel()

    async def complete(self) -> Completion:
        """Wait for the rest and return all of it.

        After a cancel it is what had arrived until then, with the reason CANCELLED.

        Raises:
            InvalidRequestError: there are several; see `complete_all`.
            OutriderError: the call failed.
        """
        self._check_single()
        return (await self.complete_all())[0]

    async def complete_all(self) -> list[Completion]:
        """Wait for the rest of every completion and return them in the order of their index.

        Raises:
            OutriderError: the call failed.
        """
        async for _ in self:
            pass
        return self._results()

    def cancel(self) -> None:
        """End the call if it still runs; does nothing afterwards."""
        self._close(self._call.cancel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()
