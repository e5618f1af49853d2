"""The gRPC side of the coordinator."""

import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from opentelemetry import trace

from coordinator import replies
from coordinator.access import Access
from coordinator.admission import Admission
from coordinator.calls import Context, traceparent_of
from coordinator.draining import DrainOrders
from coordinator.follow import Follower, describe_call
from coordinator.limits import MAX_SAMPLES, check_name, check_offsets
from coordinator.model import ServedModel
from coordinator.requests import GenerateCall, read_request
from coordinator.samples import Samples
from coordinator.services import Services
from coordinator.sessions import ClientGoneError, Sessions
from coordinator.speculation import CurrentPolicy
from outrider import logs, rpc, telemetry, wire
from outrider.errors import InternalError, OutriderError, SessionExistsError
from outrider.pb.v1 import coordinator_pb2, coordinator_pb2_grpc


class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Answers clients; one coroutine a call, which is cancelled when the client goes."""

    def __init__(
        self,
        sessions: Sessions,
        services: Services,
        policy: CurrentPolicy,
        model: ServedModel,
        admission: Admission,
        drains: DrainOrders,
        access: Access,
        *,
        unread_s: float,
    ) -> None:
        self._sessions = sessions
        self._services = services
        self._policy = policy
        self._model = model
        self._admission = admission
        self._drains = drains
        self._access = access
        self._unread_s = unread_s
        self._tracer = telemetry.tracer(__name__)
        self._log = logs.get(__name__)

    # grpc.aio also takes a coroutine that writes: unlike a generator it is always told when
    # the client goes, also in the middle of a write.
    async def Generate(  # type: ignore[override]  # noqa: N802 - the name of the rpc
        self, request: coordinator_pb2.GenerateRequest, context: Context
    ) -> None:
        """Stream the completions of one prompt."""
        arrived = time.monotonic()
        async with self._call("coordinator.generate", context) as span:
            tenant = self._access.tenant_of(context)
            self._admission.check(tenant, min(max(request.n, 1), MAX_SAMPLES))
            call = await self._read(request, tenant)
            follower = Follower(context.write, arrived=arrived, span=span, unread_s=self._unread_s)
            try:
                async with (
                    self._admission.admitted(tenant, call.samples),
                    self._samples(call.session_id, tenant) as samples,
                ):
                    await samples.start(call, telemetry.traceparent())
                    describe_call(span, samples)
                    await follower.follow(samples)
            except SessionExistsError:
                if not call.idempotency_key or follower.begun:
                    raise
                # It was asked before; whether the answer ever arrived, nobody knows.
                await self._sessions.check_same_request(call)
                async with (
                    self._resumed(call.session_id, tenant, call.samples),
                    self._samples(call.session_id, tenant) as samples,
                ):
                    await samples.resume((), telemetry.traceparent())
                    describe_call(span, samples)
                    await follower.follow(samples)

    async def Resume(  # type: ignore[override]  # noqa: N802 - the name of the rpc
        self, request: coordinator_pb2.ResumeRequest, context: Context
    ) -> None:
        """Stream the rest of what Generate began, here or at another coordinator."""
        arrived = time.monotonic()

        async def write(response: coordinator_pb2.GenerateResponse) -> None:
            await context.write(coordinator_pb2.ResumeResponse(response=response))

        async with self._call("coordinator.resume", context) as span:
            check_offsets(request)
            offsets = tuple(request.offsets)
            follower = Follower(
                write, arrived=arrived, span=span, unread_s=self._unread_s, offsets=offsets
            )
            tenant = self._access.tenant_of(context)
            sessions = max(len(offsets), 1)
            async with (
                self._resumed(request.session_id, tenant, sessions),
                self._samples(request.session_id, tenant) as samples,
            ):
                await samples.resume(offsets, telemetry.traceparent())
                describe_call(span, samples)
                await follower.follow(samples)

    async def Cancel(  # noqa: N802 - the name of the rpc
        self, request: coordinator_pb2.CancelRequest, context: Context
    ) -> coordinator_pb2.CancelResponse:
        """Cancel a session, whichever coordinator runs it."""
        async with self._errors(context):
            check_name("session_id", request.session_id)
            tenant = self._access.tenant_of(context)
            cancelled = await self._sessions.cancel(request.session_id, tenant)
            return coordinator_pb2.CancelResponse(cancelled=cancelled)

    async def GetSession(  # noqa: N802 - the name of the rpc
        self, request: coordinator_pb2.GetSessionRequest, context: Context
    ) -> coordinator_pb2.GetSessionResponse:
        """Tell how far a session is."""
        async with self._errors(context):
            check_name("session_id", request.session_id)
            tenant = self._access.tenant_of(context)
            record, token_ids = await self._sessions.find(request.session_id, tenant)
            info = replies.session_info(record, token_ids)
            return coordinator_pb2.GetSessionResponse(session=info)

    async def ListModels(  # noqa: N802 - the name of the rpc
        self, request: coordinator_pb2.ListModelsRequest, context: Context
    ) -> coordinator_pb2.ListModelsResponse:
        """Tell what is served."""
        return coordinator_pb2.ListModelsResponse(models=[replies.model_info(self._model)])

    async def DrainWorker(  # noqa: N802 - the name of the rpc
        self, request: coordinator_pb2.DrainWorkerRequest, context: Context
    ) -> coordinator_pb2.DrainWorkerResponse:
        """Have a worker give up its sessions, or serve again."""
        async with self._errors(context):
            check_name("worker_id", request.worker_id)
            left = await self._drains.give(request.worker_id, draining=request.draining)
            return coordinator_pb2.DrainWorkerResponse(sessions=left)

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
            redis_reachable=self._services.writer.reachable,
        )

    async def _read(self, request: coordinator_pb2.GenerateRequest, tenant: str) -> GenerateCall:
        previous = None
        if request.previous_session_id:
            check_name("previous_session_id", request.previous_session_id)
            previous = await self._sessions.previous(request.previous_session_id, tenant)
        return await read_request(
            request,
            self._model,
            self._policy.value,
            trusted_drafts=self._services.pool.has_trusted_draft_worker,
            tenant=tenant,
            previous=previous,
        )

    def _resumed(
        self, session_id: str, tenant: str, sessions: int
    ) -> AbstractAsyncContextManager[None]:
        running = session_id in self._sessions.running
        return self._admission.admitted(tenant, sessions, resumed=True, running=running)

    @asynccontextmanager
    async def _samples(self, session_id: str, tenant: str) -> AsyncIterator[Samples]:
        """The sessions of a request; whatever happens, they are closed at their workers."""
        samples = Samples(self._sessions, session_id, tenant)
        try:
            yield samples
        finally:
            await samples.close()

    @asynccontextmanager
    async def _call(self, name: str, context: Context) -> AsyncIterator[trace.Span]:
        """A call with its span, whose errors become its status."""
        parent = telemetry.context_of(traceparent_of(context))
        kind = trace.SpanKind.SERVER
        async with self._errors(context):
            with self._tracer.start_as_current_span(name, context=parent, kind=kind) as span:
                yield span

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
