"""All the sessions that this coordinator runs."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from coordinator.claims import Claims, check_same
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


@dataclass(frozen=True, slots=True)
class Standing:
    """A request that has begun: the record of its first session, and the sessions of it that are
    still to run. `runs_here`: that first session does.
    """

    record: SessionRecord
    unfinished: int
    runs_here: bool


class Sessions:
    """Starts, takes over, finds, cancels and drains sessions."""

    def __init__(
        self, services: Services, records: SessionRecords, model: ServedModel, coordinator_id: str
    ) -> None:
        self.running: dict[str, RunningSession] = {}
        self.draining = False
        self.claims = Claims()
        self._services = services
        self._records = records
        self._model = model
        self._coordinator_id = coordinator_id
        self._ended = asyncio.Event()

    async def start(self, call: GenerateCall, traceparent: str) -> RunningSession:
        """Write the record of a new session; `place` and `end` must follow.

        Raises:
            SessionExistsError: the id is in use.
            RecordsUnavailableError: Redis does not answer.
            UnavailableError: this coordinator is stopping.
        """
        return await self.begin(self._new_record(call), call.prompt, traceparent)

    async def begin(
        self, like: SessionRecord, prompt: Sequence[int], traceparent: str
    ) -> RunningSession:
        """Like `start`, for a new session that is to be as another one's record says."""
        self._check_not_draining()
        if like.session_id in self.running:
            raise SessionExistsError(f"session {like.session_id!r} is running; choose another id")
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
        self.running[session.session_id] = session
        self._services.figures.started()
        return session

    async def take_over(
        self, session_id: str, tenant: str, have: int, traceparent: str
    ) -> RunningSession:
        """Own a session, whoever ran it; `place` and `end` must follow.

        `have` is how many tokens of the completion its client has.

        Raises:
            UnknownSessionError: the tenant has no such session.
            RecordsUnavailableError: Redis does not answer.
            UnavailableError: this coordinator is stopping, or the log lacks too much.
        """
        self._check_not_draining()
        former = self.running.get(session_id)
        if former is not None and former.tenant == tenant:
            del self.running[session_id]
            former.pause(FencedError(f"session {session_id!r} was resumed by another call"))
        await self._services.writer.hand_over(session_id, tenant)
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
        self.running[session.session_id] = session
        # It may have to wait for its place, and its lease is renewed from now on.
        self._services.writer.later(session.journal)
        self._services.figures.resumed()
        return session

    async def place(self, session: RunningSession) -> None:
        """Place a session that was begun or taken over, unless it has ended.

        Raises:
            UnavailableError: no verify worker is up.
            OverloadedError: all verify workers are full.
        """
        try:
            await session.place()
        except (OutriderError, asyncio.CancelledError) as error:
            await self.end(session, *ending_of(error))
            raise

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
        request = self.claims.of(session_id, tenant)
        session = self.running.get(session_id)
        if session is not None and session.tenant != tenant:
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

    async def standing(self, session_id: str, tenant: str) -> Standing:
        """How far a request is, or one of its samples by itself; what runs here is known here.

        Raises:
            UnknownSessionError: the tenant has none that has begun.
            RecordsUnavailableError: it does not run here, and Redis does not answer.
        """
        request = self.claims.of(session_id, tenant)
        running = self.running.get(session_id)
        if running is not None and running.tenant != tenant:
            raise unknown_session(session_id)
        if request is not None and request.record is not None:
            return Standing(request.record, request.unfinished, running is not None)
        if running is not None:
            record = running.journal.record
        else:
            await self._services.writer.settle(session_id, tenant)
            record = await self._records.read_record(session_id)
            if record.tenant != tenant:
                raise unknown_session(session_id)
        if record.samples == 1:
            unfinished = int(record.state is not SessionState.FINISHED)
        else:
            unfinished = await self._records.count_unfinished(record.sample_ids)
        return Standing(record, unfinished, running is not None)

    async def begun_before(self, call: GenerateCall) -> Standing | None:
        """What a request has become that was made before; None if it has not begun.

        Raises:
            SessionExistsError: the id is another request's.
            InvalidRequestError: the request differs from the one with its key.
            RecordsUnavailableError: it does not run here, and Redis does not answer.
        """
        try:
            before = await self.standing(call.session_id, call.tenant)
        except UnknownSessionError:
            return None
        check_same(before.record, call)
        return before

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
