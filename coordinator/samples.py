"""The samples of one request: a session each, with seeds derived from the request's.

They start, run and are cancelled together; when one fails, the others are closed and the
call fails with its error. When the client goes, all of them are paused.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from coordinator.commit import Piece
from coordinator.requests import GenerateCall
from coordinator.session import RunningSession
from coordinator.sessions import ClientGoneError, Sessions, ending_of, may_go_on
from outrider.errors import OutriderError, UnknownSessionError
from outrider.messages import FinishReason
from outrider.sampling.seeds import derived_seed
from outrider.session.names import sample_id

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
    """The sessions of one request: `start` or `resume` once, then `run`; `close` must follow."""

    def __init__(self, sessions: Sessions, session_id: str, tenant: str) -> None:
        self.session_id = session_id
        self.tenant = tenant
        self.started: list[RunningSession] = []
        # Once all have started, or could not.
        self.settled = asyncio.Event()
        self._sessions = sessions
        # The sample that is being started, and whether any is left to start.
        self._next = ""
        self._starting = True
        self._cancelled = False
        # What the client is told when another call takes the request over.
        self._left: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        # What becomes of the samples that have not ended by themselves; None pauses them.
        self._rest: FinishReason | None = None

    async def start(self, call: GenerateCall, traceparent: str) -> None:
        """Start every sample; the errors are those of `Sessions.start`."""
        self._sessions.claim(self.session_id, self)
        for one in calls_of(call):
            await self._add(one.session_id, self._sessions.start(one, traceparent))
        self._starting = False
        self.settled.set()

    async def resume(self, offsets: Sequence[int], traceparent: str) -> None:
        """Take over every sample; the client has `offsets` tokens of each, or 0.

        Samples that had yet to start are started. The errors are those of `Sessions.take_over`.
        """
        self._sessions.claim_from(self.session_id, self)
        name, index, samples = self.session_id, 0, 1
        while index < samples:
            have = offsets[index] if index < len(offsets) else 0
            await self._add(name, self._take_over(name, index, have, traceparent))
            samples = self.started[0].journal.record.samples
            index += 1
            name = sample_id(self.session_id, index)
        self._starting = False
        self.settled.set()

    def cancel(self) -> bool:
        """Cancel every sample, also those that have yet to start; False when all have ended."""
        self._cancelled = True
        # A client that does not read can't be told for ever.
        asyncio.get_running_loop().call_later(TELL_S, self._leave, ClientGoneError("cancelled"))
        stopped = [session.stop() for session in self._known()]
        return any(stopped) or self._starting

    def leave(self, error: OutriderError) -> None:
        """Pause every sample, and tell the client `error`."""
        self._leave(error)
        for session in self._known():
            session.pause(error)

    async def run(self, emit: EmitOf, ended: EndedOf) -> None:
        """Follow all samples to their ends; their pieces come as they are committed.

        `emit` and `ended` raise `ClientGoneError` when there is nobody to tell.

        Raises:
            OutriderError: a sample failed, and the others are closed; or another call has taken
                the request over, and all are paused.
            ClientGoneError: all are paused.
        """
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
        """End or pause what is left of the samples and give up the id."""
        self.settled.set()
        try:
            for session in self.started:
                await self._sessions.end(session, self._rest)
        finally:
            self._sessions.release(self.session_id, self)

    def _leave(self, error: Exception) -> None:
        if not self._left.done():
            self._left.set_result(error)

    def _known(self) -> list[RunningSession]:
        """Those that have started, and the one that is starting."""
        starting = self._sessions.running.get(self._next)
        return [*self.started, starting] if starting else list(self.started)

    async def _add(self, name: str, starting: Coroutine[Any, Any, RunningSession]) -> None:
        self._next = name
        try:
            session = await starting
        except OutriderError as error:
            if not may_go_on(error):
                self._rest = FinishReason.CANCELLED
            raise
        finally:
            self._next = ""
        self.started.append(session)
        if self._cancelled:
            session.stop()
        if self._left.done():
            raise self._left.result()

    async def _take_over(
        self, name: str, index: int, have: int, traceparent: str
    ) -> RunningSession:
        try:
            return await self._sessions.take_over(name, self.tenant, have, traceparent)
        except UnknownSessionError:
            if index == 0:
                raise
        # Its coordinator went before it began.
        first = self.started[0]
        seed = derived_seed(first.journal.record.sampling.seed, index)
        record = replace(
            first.journal.record,
            session_id=name,
            sampling=replace(first.journal.record.sampling, seed=seed),
            samples=1,
        )
        prompt = first.journal.token_ids[: record.prompt_len]
        return await self._sessions.begin(record, prompt, traceparent)

    async def _follow(
        self, index: int, session: RunningSession, emit: EmitOf, ended: EndedOf
    ) -> None:
        async def emit_here(offset: int, pieces: list[Piece]) -> None:
            await emit(index, offset, pieces)

        try:
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


def _first_error(tasks: Sequence[asyncio.Task[None]]) -> BaseException | None:
    """That of the first sample that has one."""
    errors = (task.exception() for task in tasks if task.done() and not task.cancelled())
    return next((error for error in errors if error is not None), None)
