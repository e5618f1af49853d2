"""The gRPC side of the coordinator."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from opentelemetry import trace

from coordinator import replies
from coordinator.commit import Piece
from coordinator.model import ServedModel
from coordinator.requests import GenerateCall, read_request
from coordinator.samples import ClientGoneError, Samples
from coordinator.session import RunningSession, Services
from coordinator.sessions import Sessions
from coordinator.speculation import CurrentPolicy
from outrider import logs, rpc, telemetry, wire
from outrider.errors import InternalError, OutriderError
from outrider.messages import FinishReason
from outrider.pb.v1 import coordinator_pb2, coordinator_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Answers clients; one coroutine a call, which is cancelled when the client goes."""

    def __init__(
        self, sessions: Sessions, services: Services, policy: CurrentPolicy, model: ServedModel
    ) -> None:
        self._sessions = sessions
        self._services = services
        self._policy = policy
        self._model = model
        self._tracer = telemetry.tracer(__name__)
        self._log = logs.get(__name__)

    # grpc.aio also takes a coroutine that writes: unlike a generator it is always told when
    # the client goes, also in the middle of a write.
    async def Generate(  # type: ignore[override]  # noqa: N802 - the name of the rpc
        self, request: coordinator_pb2.GenerateRequest, context: Context
    ) -> None:
        """Stream the completions of one prompt."""
        arrived = time.monotonic()
        async with self._errors(context):
            with self._tracer.start_as_current_span(
                "coordinator.generate",
                context=telemetry.context_of(_traceparent(context)),
                kind=trace.SpanKind.SERVER,
            ) as span:
                call = await read_request(
                    request,
                    self._model,
                    self._policy.value,
                    trusted_drafts=self._services.pool.has_trusted_draft_worker,
                )
                _describe_call(span, call)
                samples = Samples(self._sessions, call)
                # Whatever happens, the sessions are closed at their workers.
                try:
                    await samples.start(telemetry.traceparent())
                    await _Stream(context, arrived, span).follow(samples, call)
                finally:
                    await samples.close()

    async def Cancel(  # noqa: N802 - the name of the rpc
        self, request: coordinator_pb2.CancelRequest, context: Context
    ) -> coordinator_pb2.CancelResponse:
        """Cancel a session of this coordinator."""
        async with self._errors(context):
            cancelled = await self._sessions.cancel(request.session_id)
            return coordinator_pb2.CancelResponse(cancelled=cancelled)

    async def GetSession(  # noqa: N802 - the name of the rpc
        self, request: coordinator_pb2.GetSessionRequest, context: Context
    ) -> coordinator_pb2.GetSessionResponse:
        """Tell how far a session is."""
        async with self._errors(context):
            record, token_ids = await self._sessions.find(request.session_id)
            info = replies.session_info(record, token_ids)
            return coordinator_pb2.GetSessionResponse(session=info)

    async def ListModels(  # noqa: N802 - the name of the rpc
        self, request: coordinator_pb2.ListModelsRequest, context: Context
    ) -> coordinator_pb2.ListModelsResponse:
        """Tell what is served."""
        return coordinator_pb2.ListModelsResponse(models=[replies.model_info(self._model)])

    async def GetStatus(  # noqa: N802 - the name of the rpc
        self, request: coordinator_pb2.GetStatusRequest, context: Context
    ) -> coordinator_pb2.GetStatusResponse:
        """Tell the workers, the sessions and the figures."""
        figures = self._services.figures
        return coordinator_pb2.GetStatusResponse(
            workers=replies.worker_infos(self._services.pool),
            running_sessions=len(self._sessions.running),
            finished_sessions=figures.finished_sessions,
            completion_tokens=figures.completion_tokens,
            speculation=wire.figures_to_pb(figures.speculation),
            redis_reachable=self._services.keeper.reachable,
        )

    @asynccontextmanager
    async def _errors(self, context: Context) -> AsyncIterator[None]:
        async with rpc.errors_as_status(context):
            try:
                yield
            except OutriderError:
                raise
            except ClientGoneError as error:
                self._log.info("the client has gone", why=str(error))
            except Exception as error:
                self._log.exception("a call failed")
                raise InternalError(
                    f"a fault of the coordinator: {type(error).__name__}; see its log"
                ) from error


class _Stream:
    """What one Generate call says to its client; `arrived` is when it came."""

    def __init__(self, context: Context, arrived: float, span: trace.Span) -> None:
        self._context = context
        self._arrived = arrived
        self._span = span
        # grpc takes one message at a time, and samples write as they come.
        self._lock = asyncio.Lock()

    async def follow(self, samples: Samples, call: GenerateCall) -> None:
        """Say all of it: started, the pieces of each sample, and how each ended."""
        await self._write(replies.started(samples.started[0].journal.record, call))
        await samples.run(self._emit, self._ended)

    async def _emit(self, index: int, offset: int, pieces: list[Piece]) -> None:
        await self._write(replies.delta(index, offset, pieces))

    async def _ended(self, index: int, session: RunningSession, reason: FinishReason) -> None:
        _describe_end(self._span, index, session, reason)
        now = time.monotonic()
        first_token_at = session.first_token_at or now
        await self._write(
            replies.finished(
                index,
                session.commit,
                reason,
                first_token_s=first_token_at - self._arrived,
                total_s=now - self._arrived,
            )
        )

    async def _write(self, response: coordinator_pb2.GenerateResponse) -> None:
        async with self._lock:
            try:
                await self._context.write(response)
            except Exception as error:  # grpc has many ways to say it, some before it knows why
                raise ClientGoneError(f"a write failed: {error!r}") from error


def _traceparent(context: Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent":
            return value if isinstance(value, str) else value.decode("ascii", "replace")
    return ""


def _describe_call(span: trace.Span, call: GenerateCall) -> None:
    span.set_attributes(
        {
            "outrider.session_id": call.session_id,
            "outrider.prompt_tokens": len(call.prompt),
            "outrider.samples": call.samples,
            "outrider.speculation": call.speculation.enabled,
            "outrider.rule": call.speculation.rule.value,
        }
    )


def _describe_end(
    span: trace.Span, index: int, session: RunningSession, reason: FinishReason
) -> None:
    """The first sample describes the call itself; the others add an event each."""
    figures = session.commit.figures
    attributes = {
        "outrider.finish_reason": reason.value,
        "outrider.completion_tokens": len(session.commit.token_ids),
        "outrider.draft_tokens": figures.draft_tokens,
        "outrider.accepted_tokens": figures.accepted_tokens,
    }
    if index == 0:
        span.set_attributes(attributes)
    else:
        span.add_event("outrider.sample", {"outrider.index": index, **attributes})
