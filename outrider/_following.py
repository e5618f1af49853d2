"""What the synchronous and the asynchronous stream of a completion share; no input or output.

The request, what was said so far, and what to do when a call fails. A call that is made again
is the same request with the same idempotency key, or, once a coordinator has said anything, a
`Resume` from the tokens that are there. If the records of the session are gone altogether (Redis
came back empty, and its coordinator went), it is generated again: the request names its
seed, and the tokens that were said before must come again.
"""

import secrets
import uuid
from typing import Any

import grpc
from opentelemetry import trace

from outrider import telemetry
from outrider._coordinators import call_error
from outrider._credentials import Metadata
from outrider._directory import Directory
from outrider._protocol import GenerateOptions, generate_request
from outrider._retry import Attempts, Retry
from outrider._transcript import Transcript
from outrider._values import Chunk, Completion
from outrider.errors import (
    DeadlineError,
    FencedError,
    InternalError,
    InvalidRequestError,
    OutriderError,
    UnavailableError,
    UnknownSessionError,
)
from outrider.pb.v1 import coordinator_pb2 as pb


def check_single(n: int) -> None:
    """Refuse to give several completions as one with an `InvalidRequestError`."""
    if n > 1:
        raise InvalidRequestError(f"there are n={n} completions; use complete_all to get them")


class Following:
    """A completion that is followed through all its streams; the base of both kinds."""

    def __init__(
        self,
        directory: Directory,
        metadata: Metadata,
        retry: Retry,
        prompt: str | None,
        options: GenerateOptions,
    ) -> None:
        arguments: dict[str, Any] = {**options}
        timeout_s: float | None = arguments.pop("timeout_s", None)
        session_id = arguments.pop("session_id", "") or uuid.uuid4().hex
        # A seed and a key of our own make the request one that can be said twice.
        key = arguments.pop("idempotency_key", "") or uuid.uuid4().hex
        if arguments.get("seed") is None:
            arguments["seed"] = secrets.randbits(64)
        self._request = generate_request(
            prompt, session_id=session_id, idempotency_key=key, **arguments
        )
        self._directory = directory
        self._transcript = Transcript(session_id, self._request.n)
        self._attempts = Attempts(retry, timeout_s)
        self._calls = 0
        self._endpoint = ""
        # Whether there are records that a stream can go on from, as far as is known.
        self._resuming = False
        # Whether the present call has said anything.
        self._answered = False
        self._error: OutriderError | None = None
        self._closed = False
        self._span = telemetry.tracer(__name__).start_span(
            "outrider.generate",
            kind=trace.SpanKind.CLIENT,
            attributes={"outrider.session_id": session_id, "server.address": str(directory)},
        )
        parent = telemetry.traceparent(trace.set_span_in_context(self._span))
        self._metadata = metadata + ((("traceparent", parent),) if parent else ())

    @property
    def session_id(self) -> str:
        """The id of the session; known from the start."""
        return self._transcript.session_id

    @property
    def prompt_text(self) -> str:
        """The prompt that was sent back (`echo`); known once the first chunk is there."""
        return self._transcript.prompt_text

    @property
    def reconnects(self) -> int:
        """How often it was taken up again, here or at another coordinator."""
        return max(self._calls - 1, 0)

    def _next_request(self, endpoint: str) -> pb.GenerateRequest | pb.ResumeRequest:
        """What to ask of an endpoint now."""
        self._endpoint = endpoint
        self._calls += 1
        self._answered = False
        if self._calls > 1:
            self._span.add_event("outrider.reconnect", {"server.address": endpoint})
        transcript = self._transcript
        if transcript.begun and self._resuming:
            transcript.resume()
            return pb.ResumeRequest(session_id=self.session_id, offsets=transcript.offsets)
        transcript.resume(from_start=True)
        return self._request

    def _feed(self, response: pb.GenerateResponse | pb.ResumeResponse) -> Chunk | None:
        said = response.response if isinstance(response, pb.ResumeResponse) else response
        try:
            chunk = self._transcript.feed(said)
        except InternalError as error:
            raise self._fail(error) from None
        if chunk is not None:
            self._attempts.progressed()
            self._directory.worked(self._endpoint)
        self._resuming = self._answered = True
        return chunk

    def _pause_s(self, error: grpc.RpcError | UnavailableError) -> float:
        """Seconds to wait before the next call; raises what the caller gets otherwise."""
        begun = self._transcript.begun
        failure: OutriderError
        if isinstance(error, UnavailableError):
            failure = error
        else:
            failure = call_error(error, self._endpoint, self._directory, answered=begun)
        if isinstance(failure, UnknownSessionError) and begun and self._resuming:
            self._resuming = False
            failure = UnavailableError(f"the records of the session are gone: {failure.message}")
        elif not isinstance(failure, FencedError):
            self._directory.failed(self._endpoint)
        known = self._directory.endpoints()
        try:
            return self._attempts.pause_s(
                failure, self._endpoint, known, begun=begun, answered=self._answered
            )
        except OutriderError as final:
            raise self._fail(final) from error

    def _fail(self, error: OutriderError) -> OutriderError:
        self._error = error
        self._span.record_exception(error)
        self._span.set_status(trace.StatusCode.ERROR, error.message)
        return error

    def _check_finished(self) -> None:
        if not self._transcript.finished and not self._closed:
            raise self._fail(InternalError(f"the stream from {self._endpoint} ended too early"))

    @property
    def _may_run_on(self) -> bool:
        """Whether the session may be alive at a coordinator, so that it has to be cancelled."""
        if self._transcript.finished or not self._calls:
            return False
        # After other errors it has ended by itself, or nobody can be told.
        return self._error is None or isinstance(self._error, DeadlineError | InternalError)

    def _results(self) -> list[Completion]:
        if self._error is not None:
            raise self._error
        return self._transcript.completions()
