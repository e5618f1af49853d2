"""All the sessions that this coordinator runs."""

import asyncio
from collections.abc import Callable, Sequence

from coordinator.commit import CommitStep, Limits
from coordinator.detokenizer import Detokenizer
from coordinator.journal import Journal
from coordinator.model import ServedModel
from coordinator.requests import GenerateCall, ending_ids
from coordinator.session import RunningSession, Services
from outrider.errors import (
    OutriderError,
    RecordsUnavailableError,
    SessionExistsError,
    UnavailableError,
)
from outrider.messages import FinishReason
from outrider.session.records import SessionRecord, SessionRecords, SessionState

# How long sessions that were stopped get to tell their clients.
STOP_S = 2.0


class Sessions:
    """Starts, finds, cancels and drains sessions."""

    def __init__(
        self, services: Services, records: SessionRecords, model: ServedModel, coordinator_id: str
    ) -> None:
        self.running: dict[str, RunningSession] = {}
        self.draining = False
        # What cancels all samples of a request that runs, by the request's id.
        self._claims: dict[str, Callable[[], bool]] = {}
        self._services = services
        self._records = records
        self._model = model
        self._coordinator_id = coordinator_id
        self._ended = asyncio.Event()

    def claim(self, session_id: str, stop: Callable[[], bool]) -> None:
        """Take an id for a request until `release`; `stop` is how it is cancelled.

        `stop` tells whether anything was left to cancel.

        Raises:
            SessionExistsError: another request has the id.
        """
        if session_id in self._claims or session_id in self.running:
            raise _is_running(session_id)
        self._claims[session_id] = stop

    def release(self, session_id: str) -> None:
        """Give up an id that was claimed."""
        del self._claims[session_id]

    async def start(self, call: GenerateCall, traceparent: str) -> RunningSession:
        """Write the record of a new session and place it; `end` must follow.

        Raises:
            SessionExistsError: the id is in use.
            RecordsUnavailableError: Redis does not answer.
            UnavailableError: no verify worker is up, or this coordinator is stopping.
            OverloadedError: all verify workers are full.
        """
        if self.draining:
            raise UnavailableError("this coordinator is stopping; use another one")
        if call.session_id in self.running:
            raise _is_running(call.session_id)
        session = self._make(self._new_record(call), call.prompt, traceparent)
        await self._create(session.journal)
        self.running[call.session_id] = session
        try:
            await session.place()
        except asyncio.CancelledError:
            await self.end(session, FinishReason.CANCELLED)
            raise
        except OutriderError:
            await self.end(session, FinishReason.ERROR)
            raise
        self._services.figures.started()
        return session

    async def end(self, session: RunningSession, reason: FinishReason) -> None:
        """Close the session; `reason` is noted unless it has ended by itself."""
        try:
            await session.close(reason)
        finally:
            self.running.pop(session.session_id, None)
            self._ended.set()

    async def cancel(self, session_id: str) -> bool:
        """Cancel a session, or all samples of a request; False when all had ended already.

        Raises:
            UnknownSessionError: there is no such session.
            UnavailableError: another coordinator runs it.
            RecordsUnavailableError: it does not run here, and Redis does not answer.
        """
        stop_samples = self._claims.get(session_id)
        if stop_samples is not None and stop_samples():
            return True
        session = self.running.get(session_id)
        if session is not None:
            session.stop()
            return True
        record, _ = await self._records.read(session_id)
        if record.state is SessionState.RUNNING:
            raise UnavailableError(
                f"session {session_id!r} is run by coordinator {record.owner}; cancel it there"
            )
        return False

    async def find(self, session_id: str) -> tuple[SessionRecord, list[int]]:
        """The record and every committed token of a session, running here or not.

        Raises:
            UnknownSessionError: there is no such session.
            RecordsUnavailableError: it does not run here, and Redis does not answer.
        """
        session = self.running.get(session_id)
        if session is not None:
            return session.journal.record, list(session.journal.token_ids)
        return await self._records.read(session_id)

    def check_drafters(self) -> None:
        """Give another draft worker to the sessions whose own is gone."""
        for session in self.running.values():
            session.check_drafter()

    async def drain(self, drain_s: float) -> None:
        """Take no more sessions, let the running ones finish for `drain_s`, then stop them."""
        self.draining = True
        if await self._none_running(drain_s):
            return
        for session in list(self.running.values()):
            session.stop(
                UnavailableError("this coordinator is stopping and the session took too long")
            )
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
        keeper = self._services.keeper
        if not keeper.reachable:
            raise RecordsUnavailableError(
                "Redis does not answer, so no new session can be recorded; try again later"
            )
        try:
            await journal.create()
        except (RecordsUnavailableError, asyncio.CancelledError):
            # The record may be there all the same, and must not stay "running".
            journal.finish(FinishReason.CANCELLED)
            keeper.later(journal)
            raise

    def _new_record(self, call: GenerateCall) -> SessionRecord:
        return SessionRecord(
            session_id=call.session_id,
            owner=self._coordinator_id,
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
            epoch=0,  # raised by the first placement
        )

    def _make(
        self, record: SessionRecord, prompt: Sequence[int], traceparent: str
    ) -> RunningSession:
        """A session as its record says; nothing else about the request is needed."""
        model = self._model
        stop_ids = ending_ids(model, record.stop_ids, ignore_eos=record.ignore_eos)
        commit = CommitStep(
            Detokenizer(model.vocabulary),
            limits=Limits(record.prompt_len, record.max_tokens, model.context_len),
            stop_ids=stop_ids,
            stop=record.stop,
            include_stop=record.include_stop,
        )
        return RunningSession(
            self._services,
            Journal(self._records, record, prompt),
            commit,
            stop_ids=stop_ids,
            traceparent=traceparent,
        )


def _is_running(session_id: str) -> SessionExistsError:
    return SessionExistsError(f"session {session_id!r} is running; choose another id")
