"""The gRPC side of the coordinator."""

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
from coordinator.session import RunningSession, Services
from coordinator.sessions import Sessions
from outrider import logs, rpc, telemetry, wire
from outrider.errors import InternalError, OutriderError
from outrider.messages import FinishReason
from outrider.pb.v1 import coordinator_pb2, coordinator_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Answers clients; one coroutine a call, which is cancelled when the client goes."""

    def __init__(self, sessions: Sessions, services: Services, model: ServedModel) -> None:
        self._sessions = sessions
        self._services = services
        self._model = model
        self._tracer = telemetry.tracer(__name__)
        self._log = logs.get(__name__)

    # grpc.aio also takes a coroutine that writes: unlike a generator it is always told when
    # the client goes, also in the middle of a write.
    async def Generate(  # type: ignore[override]  # noqa: N802 - the name of the rpc
        self, request: coordinator_pb2.GenerateRequest, context: Context
    ) -> None:
        """Stream one completion."""
        arrived = time.monotonic()
        async with self._errors(context):
            with self._tracer.start_as_current_span(
                "coordinator.generate",
                context=telemetry.context_of(_traceparent(context)),
                kind=trace.SpanKind.SERVER,
            ) as span:
                call = await read_request(request, self._model)
                _describe_call(span, call)
                session = await self._sessions.start(call, telemetry.traceparent())
                reason = await self._follow(session, context)
                _describe_end(span, session, reason)
                now = time.monotonic()
                first_token_at = session.first_token_at or now
                await context.write(
                    replies.finished(
                        session.commit,
                        reason,
                        first_token_s=first_token_at - arrived,
                        total_s=now - arrived,
                    )
                )

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

    async def _follow(self, session: RunningSession, context: Context) -> FinishReason:
        """Stream the session to its end; whatever happens, it is closed at its workers."""

        async def emit(offset: int, pieces: list[Piece]) -> None:
            await context.write(replies.delta(offset, pieces))

        # What is left if this coroutine is cancelled: the client has gone.
        reason = FinishReason.CANCELLED
        try:
            await context.write(replies.started(session.journal.record))
            reason = await session.run(emit)
        except Exception:
            reason = FinishReason.CANCELLED if _is_over(context) else FinishReason.ERROR
            raise
        finally:
            await self._sessions.end(session, reason)
        return reason

    @asynccontextmanager
    async def _errors(self, context: Context) -> AsyncIterator[None]:
        async with rpc.errors_as_status(context):
            try:
                yield
            except OutriderError:
                raise
            except Exception as error:
                if _is_over(context):
                    return  # a write failed because the client has gone; nobody listens
                self._log.exception("a call failed")
                raise InternalError(
                    f"a fault of the coordinator: {type(error).__name__}; see its log"
                ) from error


def _is_over(context: Context) -> bool:
    return context.cancelled() or context.done()


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
            "outrider.speculation": call.speculation.enabled,
        }
    )


def _describe_end(span: trace.Span, session: RunningSession, reason: FinishReason) -> None:
    figures = session.commit.figures
    span.set_attributes(
        {
            "outrider.finish_reason": reason.value,
            "outrider.completion_tokens": len(session.commit.token_ids),
            "outrider.draft_tokens": figures.draft_tokens,
            "outrider.accepted_tokens": figures.accepted_tokens,
        }
    )
