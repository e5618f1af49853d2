"""What a call becomes: a request that begins, one that is gone on with, or one that is only read.

A call takes the id first, then it is let in, then it starts. So who waits to be let in is known by
its id as well: the same request again, made by a client that has lost the first call, takes its
place and does not wait for it. What has begun is let in for as many sessions as its records say,
whatever the client says; what has finished needs no place.
"""

from collections.abc import Sequence
from contextlib import AsyncExitStack

from opentelemetry import trace

from coordinator.admission import Admission
from coordinator.follow import Follower, describe_call
from coordinator.limits import check_name
from coordinator.requests import GenerateCall
from coordinator.samples import Samples
from coordinator.sessions import Sessions, Standing
from outrider import telemetry
from outrider.errors import RecordsUnavailableError, SessionExistsError, UnknownSessionError


class Reception:
    """Lets calls in and has them followed."""

    def __init__(self, sessions: Sessions, admission: Admission) -> None:
        self._sessions = sessions
        self._admission = admission

    async def check(self, session_id: str, tenant: str, samples: int, *, keyed: bool) -> None:
        """Refuse at once what would be refused in the end; for before the prompt is read.

        Raises:
            InvalidRequestError, OverloadedError: as `Admission.check`.
        """
        if keyed and self._admission.waits(tenant, samples):
            check_name("session_id", session_id)
            if await self._has_begun(session_id, tenant):
                return
        self._admission.check(tenant, samples)

    async def generate(self, call: GenerateCall, follower: Follower, span: trace.Span) -> None:
        """Follow a new request from its beginning; with a key also one that was begun before.

        The errors are those of `Sessions`, `Admission.admitted` and `Samples.run`.
        """
        try:
            await self._generate(call, follower, span, look=False)
        except SessionExistsError:
            if not call.idempotency_key or follower.begun:
                raise
            # It was asked before; whether the answer ever arrived, nobody knows.
            await self._generate(call, follower, span, look=True)

    async def resume(
        self,
        session_id: str,
        tenant: str,
        offsets: Sequence[int],
        follower: Follower,
        span: trace.Span,
    ) -> None:
        """Follow a request that was begun, here or elsewhere, from `offsets` on."""
        before = await self._sessions.standing(session_id, tenant)
        async with AsyncExitStack() as stack:
            samples = Samples(self._sessions, before.record)
            stack.callback(samples.release)
            former = self._sessions.claims.take_over(samples)
            here = before.runs_here or (former is not None and former.places > 0)
            await self._let_on(stack, samples, before, here=here)
            await samples.resume(offsets, telemetry.traceparent())
            describe_call(span, samples)
            await follower.follow(samples)

    async def _generate(
        self, call: GenerateCall, follower: Follower, span: trace.Span, *, look: bool
    ) -> None:
        async with AsyncExitStack() as stack:
            samples = Samples(self._sessions, call)
            stack.callback(samples.release)
            former = self._sessions.claims.take(samples)
            here = former is not None and former.places > 0
            if former is not None:
                # Until then nobody knows whether there will be a record.
                await samples.unless_left(former.settled.wait())
            before = None
            keyed = bool(call.idempotency_key)
            # Where a new one would begin at once, it is tried, which asks Redis once less.
            if keyed and (look or former or self._admission.waits(call.tenant, call.samples)):
                before = await samples.unless_left(self._sessions.begun_before(call))
            if before is not None:
                await self._let_on(stack, samples, before, here=here or before.runs_here)
                await samples.resume((), telemetry.traceparent())
            else:
                entering = self._admission.admitted(call.tenant, call.samples, running=here)
                samples.places = await samples.unless_left(stack.enter_async_context(entering))
                stack.push_async_callback(samples.close)
                await samples.start(call, telemetry.traceparent())
            describe_call(span, samples)
            await follower.follow(samples)

    async def _let_on(
        self, stack: AsyncExitStack, samples: Samples, before: Standing, *, here: bool
    ) -> None:
        """Let in what has begun, for as many sessions as are left of it."""
        samples.has_begun = True
        if before.unfinished:
            entering = self._admission.admitted(
                before.record.tenant, before.unfinished, resumed=True, running=here
            )
            samples.places = await samples.unless_left(stack.enter_async_context(entering))
        # Before the places are given up.
        stack.push_async_callback(samples.close)

    async def _has_begun(self, session_id: str, tenant: str) -> bool:
        try:
            if self._sessions.claims.of(session_id, tenant) is None:
                await self._sessions.standing(session_id, tenant)
        except (UnknownSessionError, RecordsUnavailableError):
            return False
        return True
