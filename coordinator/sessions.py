"""All the sessions that this coordinator runs."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from coordinator.conversation import Previous
from coordinator.journal import Journal
from coordinator.model import ServedModel
from coordinator.requests import GenerateCall
from coordinator.restore import as_previous, check_can_go_on, commit_step, restore
from coordinator.services import Services
from coordinator.session import RunningSession
from outrider.errors import (
    FencedError,
    InternalError,
    InvalidRequestError,
    OutriderError,
    OverloadedError,
    RecordsUnavailableError,
    SessionExistsError,
    UnavailableError,
    UnknownSessionError,
)
from outrider.messages import FinishReason
from outrider.session.record import SessionRecord, SessionState
from outrider.session.record_calls import unknown_session
from outrider.session.records import SessionRecords

# How long sessions that were stopped get to tell their clients.
STOP_S = 2.0


class ClientGoneError(Exception):
    """Nobody reads the call any more; what is left of it is paused."""


class Request(Protocol):
    """A request that has claimed its id; all that is known of it here."""

    tenant: str
    # Once all of it has started, or could not.
    settled: asyncio.Event

    def cancel(self) -> bool:
        """Cancel all of it; False when nothing was left to cancel."""

    def leave(self, error: OutriderError) -> None:
        """Pause all of it, and tell its client `error`."""


class Sessions:
    """Starts, takes over, finds, cancels and drains sessions."""

    def __init__(
        self, services: Services, records: SessionRecords, model: ServedModel, coordinator_id: str
    ) -> None:
        self.running: dict[str, RunningSession] = {}
        self.draining = False
        # Requests that are followed here, by their ids.
        self._claims: dict[str, Request] = {}
        self._services = services
        self._records = records
        self._model = model
        self._coordinator_id = coordinator_id
        self._ended = asyncio.Event()

    def claim(self, session_id: str, request: Request) -> None:
        """Take an id for a request until `release`.

        Raises:
            SessionExistsError: another request has the id.
        """
        if session_id in self._claims or session_id in self.running:
            raise _is_running(session_id)
        self._claims[session_id] = request

    def claim_from(self, session_id: str, request: Request) -> None:
        """Take an id for a request that resumes it; whoever follows it here has to leave.

        Raises:
            UnknownSessionError: it is another tenant's.
        """
        other = self._claims.get(session_id)
        if other is not None:
            if other.tenant != request.tenant:
                raise unknown_session(session_id)
            other.leave(_resumed(session_id))
        self._claims[session_id] = request

    def release(self, session_id: str, request: Request) -> None:
        """Give up an id that was claimed, unless another request has it now."""
        if self._claims.get(session_id) is request:
            del self._claims[session_id]

    async def start(self, call: GenerateCall, traceparent: str) -> RunningSession:
        """Write the record of a new session and place it; `end` must follow.

        Raises:
            SessionExistsError: the id is in use.
            RecordsUnavailableError: Redis does not answer.
            UnavailableError: no verify worker is up, or this coordinator is stopping.
            OverloadedError: all verify workers are full.
        """
        return await self.begin(self._new_record(call), call.prompt, traceparent)

    async def begin(
        self, like: SessionRecord, prompt: Sequence[int], traceparent: str
    ) -> RunningSession:
        """Like `start`, for a new session that is to be as another one's record says."""
        self._check_not_draining()
        if like.session_id in self.running:
            raise _is_running(like.session_id)
        record = replace(
            like,
            owner=self._coordinator_id,
            epoch=0,  # raised by the first placement
            state=SessionState.RUNNING,
            finish_reason=None,
            failure=None,
            target=None,
            verify_worker_id="",
            draft_worker_id="",
        )
        commit, stop_ids = commit_step(self._model, record)
        journal = Journal(self._records.calls, record, prompt, commit.figures)
        session = RunningSession(
            self._services, journal, commit, stop_ids=stop_ids, traceparent=traceparent
        )
        if like.finish_reason is FinishReason.CANCELLED:
            commit.end(FinishReason.CANCELLED)  # before it began
        await self._create(journal)
        await self._run(session)
        self._services.figures.started()
        return session

    async def take_over(
        self, session_id: str, tenant: str, have: int, traceparent: str
    ) -> RunningSession:
        """Own a session, whoever ran it, and place it unless it has ended; `end` must follow.

        `have` is how many tokens of the completion its client has.

        Raises:
            UnknownSessionError: the tenant has no such session.
            RecordsUnavailableError: Redis does not answer.
            UnavailableError, OverloadedError: as of `start`.
        """
        self._check_not_draining()
        former = self.running.get(session_id)
        if former is not None and former.tenant == tenant:
            del self.running[session_id]
            former.pause(_resumed(session_id))
        await self._services.writer.hand_over(session_id)
        stored = await self._records.take_over(
            session_id, owner=self._coordinator_id, tenant=tenant
        )
        commit, stop_ids = commit_step(self._model, stored.record)
        session = RunningSession(
            self._services,
            Journal.taken_over(self._records.calls, stored),
            commit,
            stop_ids=stop_ids,
            traceparent=traceparent,
            backlog=restore(commit, stored),
        )
        try:
            check_can_go_on(session, self._model, have)
        except OutriderError:
            await session.close(None)
            raise
        await self._run(session)
        self._services.figures.resumed()
        return session

    async def end(
        self,
        session: RunningSession,
        reason: FinishReason | None,
        error: OutriderError | None = None,
    ) -> None:
        """Close the session; `reason` is noted unless it has ended by itself; None pauses it."""
        try:
            await session.close(reason, error)
        finally:
            if self.running.get(session.session_id) is session:
                del self.running[session.session_id]
            self._ended.set()

    async def cancel(self, session_id: str, tenant: str) -> bool:
        """Cancel a session, or all samples of a request; False when all had ended already.

        Raises:
            UnknownSessionError: the tenant has no such session.
            RecordsUnavailableError: it does not run here, and Redis does not answer.
        """
        request = self._claims.get(session_id)
        session = self.running.get(session_id)
        here = request or session
        if here is not None and here.tenant != tenant:
            raise unknown_session(session_id)
        if request is not None and request.cancel():
            return True
        if session is not None and session.stop():
            return True
        record, _ = await self.find(session_id, tenant)
        cancelled = False
        for name in record.sample_ids:
            try:
                cancelled |= await self._records.cancel(name, tenant=tenant)
            except UnknownSessionError:
                continue  # its coordinator went before it began
        return cancelled

    async def find(self, session_id: str, tenant: str) -> tuple[SessionRecord, list[int]]:
        """The record and every committed token of a session, running here or not.

        Raises:
            UnknownSessionError: the tenant has no such session.
            RecordsUnavailableError: it does not run here, and Redis does not answer.
        """
        session = self.running.get(session_id)
        if session is not None:
            record, token_ids = session.journal.record, list(session.journal.token_ids)
        else:
            record, token_ids = await self._records.read(session_id)
        if record.tenant != tenant:
            raise unknown_session(session_id)
        return record, token_ids

    async def previous(self, session_id: str, tenant: str) -> Previous:
        """A session that has finished, to be continued.

        Raises:
            UnknownSessionError: the tenant has no such session.
            InvalidRequestError: it has not finished, or it failed.
            RecordsUnavailableError: Redis does not answer.
        """
        record, token_ids = await self.find(session_id, tenant)
        return as_previous(self._model, record, token_ids)

    async def check_same_request(self, call: GenerateCall) -> None:
        """Refuse a request whose session exists, unless it is the very same request again.

        Raises:
            SessionExistsError: the session is another request's.
            InvalidRequestError: the request differs from the one with its key.
        """
        session_id = call.session_id
        here = self._claims.get(session_id)
        if here is not None:
            await here.settled.wait()  # until then there may be no record
        exists = SessionExistsError(f"session {session_id!r} exists already; choose another id")
        try:
            record, _ = await self.find(session_id, call.tenant)
        except UnknownSessionError as error:
            raise exists from error  # another tenant's
        if record.idempotency_key != call.idempotency_key:
            raise exists
        if record.digest != call.digest:
            raise InvalidRequestError(
                f"session {session_id!r} was begun with this idempotency_key by another request; "
                "send the same one, or choose another id and key"
            )

    def check_drafters(self) -> None:
        """Give another draft worker to the sessions whose own is gone."""
        for session in self.running.values():
            session.check_drafter()

    async def drain(self, drain_s: float) -> None:
        """Take no more sessions, let the running ones finish for `drain_s`, then pause them."""
        self.draining = True
        if await self._none_running(drain_s):
            return
        error = UnavailableError("this coordinator is stopping; resume the session at another one")
        for session in list(self.running.values()):
            session.pause(error)
        await self._none_running(STOP_S)

    async def _none_running(self, wait_s: float) -> bool:
        try:
            async with asyncio.timeout(wait_s):
                while self.running:
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            return False
        return True

    async def _create(self, journal: Journal) -> None:
        writer = self._services.writer
        try:
            await writer.create(journal)
        except (RecordsUnavailableError, asyncio.CancelledError):
            # The record may be there all the same, and must not stay "running".
            journal.pause()
            writer.later(journal)
            raise

    async def _run(self, session: RunningSession) -> None:
        """Place a session that is owned."""
        self.running[session.session_id] = session
        try:
            await session.place()
        except (OutriderError, asyncio.CancelledError) as error:
            await self.end(session, *ending_of(error))
            raise

    def _check_not_draining(self) -> None:
        if self.draining:
            raise UnavailableError("this coordinator is stopping; use another one")

    def _new_record(self, call: GenerateCall) -> SessionRecord:
        return SessionRecord(
            session_id=call.session_id,
            owner=self._coordinator_id,
            tenant=call.tenant,
            model=self._model.name,
            prompt_len=len(call.prompt),
            sampling=call.sampling,
            max_tokens=call.limits.max_tokens,
            stop=call.stop,
            stop_ids=call.stop_ids,
            speculation=call.speculation,
            ignore_eos=call.ignore_eos,
            include_stop=call.include_stop,
            logprobs=call.logprobs,
            idempotency_key=call.idempotency_key,
            digest=call.digest,
            samples=call.samples,
            messages=call.messages,
            prompt_text=call.prompt_text,
        )


def may_go_on(error: BaseException) -> bool:
    """Whether a session that ran into `error` is paused, to be resumed, and has not failed."""
    passing = (UnavailableError, OverloadedError, FencedError, ClientGoneError)
    return isinstance(error, passing) or not isinstance(error, Exception)


def ending_of(error: BaseException) -> tuple[FinishReason | None, OutriderError | None]:
    """How a session ends that ran into `error`: paused (no reason), or failed with what."""
    if may_go_on(error):
        return None, None
    if isinstance(error, OutriderError):
        return FinishReason.ERROR, error
    return FinishReason.ERROR, InternalError("a fault of the coordinator; see its log")


def _resumed(session_id: str) -> FencedError:
    return FencedError(f"session {session_id!r} was resumed by another call")


def _is_running(session_id: str) -> SessionExistsError:
    return SessionExistsError(f"session {session_id!r} is running; choose another id")
