"""The samples of one request: a session each, with seeds derived from the request's.

They start, run and are cancelled together; when one fails, the others are closed and the
call fails with its error. When the client goes, all of them are paused.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

from coordinator.claims import Asked
from coordinator.commit import Piece
from coordinator.requests import GenerateCall
from coordinator.session import RunningSession
from coordinator.sessions import ClientGoneError, Sessions, ending_of, may_go_on
from outrider.errors import OutriderError, SessionExistsError, UnknownSessionError
from outrider.messages import FinishReason
from outrider.sampling.seeds import derived_seed
from outrider.session.names import sample_id
from outrider.session.record import SessionRecord, SessionState

T = TypeVar("T")
# (index of the sample, completion tokens before the pieces, pieces)
EmitOf: TypeAlias = Callable[[int, int, list[Piece]], Awaitable[None]]
# (index of the sample, its session, why it ended)
EndedOf: TypeAlias = Callable[[int, RunningSession, FinishReason], Awaitable[None]]
# How long a client that reads nothing holds up the end of what was cancelled.
TELL_S = 2.0


def calls_of(call: GenerateCall) -> list[GenerateCall]:
    """One call for each sample of `call`; the first has its id and seed, and their number."""
    return [
        replace(
            call,
            session_id=sample_id(call.session_id, index),
            sampling=replace(call.sampling, seed=derived_seed(call.sampling.seed, index)),
            samples=1 if index else call.samples,
        )
        for index in range(call.samples)
    ]


class Samples:
    """The sessions of one request: `start` or `resume` once, then `run`; `close` must follow.

    `asked` says which request it is. Whoever lets it in sets `places`, and `has_begun` if there
    are records of it already. `release` is the last of all.
    """

    def __init__(self, sessions: Sessions, asked: Asked) -> None:
        self.asked = asked
        self.started: list[RunningSession] = []
        # Once all have started, or could not.
        self.settled = asyncio.Event()
        self.places = 0
        self.has_begun = False
        self._sessions = sessions
        # Whether any is left to start.
        self._starting = True
        self._cancelled = False
        # Those that wait until others of the request have ended, and what they wait for.
        self._later: set[RunningSession] = set()
        self._turns = asyncio.Semaphore(0)
        # What the client is told when another call takes the request over.
        self._left: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        # What becomes of the samples that have not ended by themselves; None pauses them.
        self._rest: FinishReason | None = None

    @property
    def record(self) -> SessionRecord | None:
        """That of the first sample, once it is here."""
        return self.started[0].journal.record if self.started else None

    @property
    def unfinished(self) -> int:
        """The samples that have not ended, and those that have yet to start."""
        record = self.record
        ended = [session.journal.record.state is SessionState.FINISHED for session in self.started]
        return record.samples - sum(ended) if record is not None else 0

    async def unless_left(self, doing: Coroutine[Any, Any, T]) -> T:
        """Do something that may take long before anything has started.

        Raises:
            OutriderError: another call has taken the request over.
        """
        task = asyncio.ensure_future(doing)
        try:
            either: set[asyncio.Future[Any]] = {task, self._left}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if self._left.done():
            raise self._left.result()
        return task.result()

    async def start(self, call: GenerateCall, traceparent: str) -> None:
        """Start every sample; the errors are those of `Sessions.start` and `Sessions.place`."""
        for one in calls_of(call):
            await self._place(await self._add(self._sessions.start(one, traceparent)))
        self._started()

    async def resume(self, offsets: Sequence[int], traceparent: str) -> None:
        """Take over every sample; the client has `offsets` tokens of each, or 0.

        As many run at once as there are `places`. Samples that had yet to start are started. The
        errors are those of `Sessions.take_over` and `Sessions.place`.
        """
        name, index, samples = self.asked.session_id, 0, 1
        while index < samples:
            have = offsets[index] if index < len(offsets) else 0
            await self._add(self._take_over(name, index, have, traceparent))
            samples = self.started[0].journal.record.samples
            index += 1
            name = sample_id(self.asked.session_id, index)
        left = [session for session in self.started if session.commit.finish_reason is None]
        self._later.update(left[self.places :])
        for session in left[: self.places]:
            await self._place(session)
        self._started()

    def cancel(self) -> bool:
        """Cancel every sample, also those that have yet to start.

        False when all have ended, and when they still have to be taken over: then their records
        have to be cancelled.
        """
        self._cancelled = True
        stopped = [session.stop() for session in self.started]
        if not self._starting:
            self._tell_for_a_while()
        return any(stopped) or (self._starting and not self.has_begun)

    def leave(self, error: OutriderError) -> None:
        """Pause every sample, and tell the client `error`."""
        self._leave(error)
        for session in self.started:
            session.pause(error)

    async def run(self, emit: EmitOf, ended: EndedOf) -> None:
        """Follow all samples to their ends; their pieces come as they are committed.

        `emit` and `ended` raise `ClientGoneError` when there is nobody to tell.

        Raises:
            OutriderError: a sample failed, and the others are closed; or another call has taken
                the request over, and all are paused.
            ClientGoneError: all are paused.
        """
        if self._cancelled:
            self._tell_for_a_while()
        tasks = [
            asyncio.create_task(self._follow(index, session, emit, ended))
            for index, session in enumerate(self.started)
        ]
        all_of_them = asyncio.ensure_future(
            asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        )
        failed: BaseException | None = None
        try:
            # Whoever is taken over may be stuck in a write that nobody reads.
            either: set[asyncio.Future[Any]] = {all_of_them, self._left}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            failed = self._left.result() if self._left.done() else _first_error(tasks)
            if isinstance(failed, Exception) and not may_go_on(failed):
                self._rest = FinishReason.CANCELLED
        finally:
            for task in (all_of_them, *tasks):
                task.cancel()
            await asyncio.gather(all_of_them, *tasks, return_exceptions=True)
        if failed is not None:
            raise failed

    async def close(self) -> None:
        """End or pause what is left of the samples."""
        self.settled.set()
        for session in self.started:
            await self._sessions.end(session, self._rest)

    def release(self) -> None:
        """Give up the id, when all is over or nothing has started."""
        self.settled.set()
        self._sessions.claims.release(self)

    def _leave(self, error: Exception) -> None:
        if not self._left.done():
            self._left.set_result(error)

    def _tell_for_a_while(self) -> None:
        """Have a client that does not read hold up the end of what was cancelled no longer."""
        loop = asyncio.get_running_loop()
        loop.call_later(TELL_S, self._leave, ClientGoneError("cancelled"))

    def _started(self) -> None:
        self._starting = False
        self.settled.set()

    async def _add(self, starting: Coroutine[Any, Any, RunningSession]) -> RunningSession:
        """One more that has started, and has yet to be placed."""
        async with self._noting_errors():
            session = await starting
        self.started.append(session)
        self._check_left()
        if self._cancelled:
            session.stop()
        return session

    async def _place(self, session: RunningSession) -> None:
        async with self._noting_errors():
            await self._sessions.place(session)
        self._check_left()

    def _check_left(self) -> None:
        if self._left.done():
            raise self._left.result()

    @asynccontextmanager
    async def _noting_errors(self) -> AsyncIterator[None]:
        """When one sample can't start, the others can't either."""
        try:
            yield
        except OutriderError as error:
            if not may_go_on(error):
                self._rest = FinishReason.CANCELLED
            raise

    async def _take_over(
        self, name: str, index: int, have: int, traceparent: str
    ) -> RunningSession:
        tenant = self.asked.tenant
        if index == 0:
            return await self._sessions.take_over(name, tenant, have, traceparent)
        first = self.started[0].journal
        seed = derived_seed(first.record.sampling.seed, index)
        record = replace(
            first.record,
            session_id=name,
            sampling=replace(first.record.sampling, seed=seed),
            samples=1,
        )
        prompt = first.token_ids[: record.prompt_len]
        try:
            session = await self._sessions.take_over(name, tenant, have, traceparent)
        except UnknownSessionError:
            # Its coordinator went before it began.
            return await self._sessions.begin(record, prompt, traceparent)
        found = session.journal
        if found.token_ids[: record.prompt_len] == prompt and _ask_for_the_same(
            found.record, record
        ):
            return session
        # An earlier request had the same id, and what is left of it outlived its first sample.
        await self._sessions.end(session, None)
        raise SessionExistsError(f"session {name!r} is of another request; choose another id")

    async def _follow(
        self, index: int, session: RunningSession, emit: EmitOf, ended: EndedOf
    ) -> None:
        async def emit_here(offset: int, pieces: list[Piece]) -> None:
            await emit(index, offset, pieces)

        try:
            async with self._in_turn(session):
                reason = await session.run(emit_here)
        except asyncio.CancelledError:
            # The client has gone, or another sample failed.
            await self._sessions.end(session, self._rest)
            raise
        except Exception as error:
            await self._sessions.end(session, *ending_of(error))
            raise
        await self._sessions.end(session, reason)
        await ended(index, session, reason)

    @asynccontextmanager
    async def _in_turn(self, session: RunningSession) -> AsyncIterator[None]:
        """Wait for another sample to end, if there was no room for all of them."""
        needs_place = session.commit.finish_reason is None
        if session in self._later:
            await self._turns.acquire()
            await self._sessions.place(session)
        try:
            yield
        finally:
            if needs_place:
                self._turns.release()


def _ask_for_the_same(one: SessionRecord, other: SessionRecord) -> bool:
    """Whether two sessions are of one request, as far as records tell."""
    alike = replace(
        one,
        owner=other.owner,
        epoch=other.epoch,
        target=other.target,
        verify_worker_id=other.verify_worker_id,
        draft_worker_id=other.draft_worker_id,
        state=other.state,
        finish_reason=other.finish_reason,
        failure=other.failure,
    )
    return alike == other


def _first_error(tasks: Sequence[asyncio.Task[None]]) -> BaseException | None:
    """That of the first sample that has one."""
    errors = (task.exception() for task in tasks if task.done() and not task.cancelled())
    return next((error for error in errors if error is not None), None)
