"""The samples of one request: a session each, with seeds derived from the request's.

They start, run and are cancelled together; when one fails, the others are closed and the
call fails with its error.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeAlias

from coordinator.commit import Piece
from coordinator.requests import GenerateCall
from coordinator.session import RunningSession
from coordinator.sessions import Sessions
from outrider.messages import FinishReason
from outrider.sampling.seeds import derived_seed
from outrider.session.names import sample_id

# (index of the sample, completion tokens before the pieces, pieces)
EmitOf: TypeAlias = Callable[[int, int, list[Piece]], Awaitable[None]]
# (index of the sample, its session, why it ended)
EndedOf: TypeAlias = Callable[[int, RunningSession, FinishReason], Awaitable[None]]


class ClientGoneError(Exception):
    """Nobody reads the call any more; what is left of it is cancelled."""


def calls_of(call: GenerateCall) -> list[GenerateCall]:
    """One call of a single sample for each sample of `call`; the first has its id and seed."""
    return [
        replace(
            call,
            session_id=sample_id(call.session_id, index),
            sampling=replace(call.sampling, seed=derived_seed(call.sampling.seed, index)),
            samples=1,
        )
        for index in range(call.samples)
    ]


class Samples:
    """The sessions of one request: `start` once, then `run`; `close` must follow in any case."""

    def __init__(self, sessions: Sessions, call: GenerateCall) -> None:
        self.started: list[RunningSession] = []
        self._sessions = sessions
        self._calls = calls_of(call)
        self._claimed = False
        self._stopped = False

    @property
    def session_id(self) -> str:
        """The request's id, which is that of the first sample."""
        return self._calls[0].session_id

    async def start(self, traceparent: str) -> None:
        """Start every sample; the errors are those of `Sessions.start`."""
        self._sessions.claim(self.session_id, self.stop)
        self._claimed = True
        for call in self._calls:
            session = await self._sessions.start(call, traceparent)
            self.started.append(session)
            if self._stopped:
                session.stop()

    def stop(self) -> bool:
        """Cancel every sample, also those that have yet to start; False when all have ended."""
        self._stopped = True
        running = [self._sessions.running.get(call.session_id) for call in self._calls]
        for session in running:
            if session is not None:
                session.stop()
        return any(running) or len(self.started) < len(self._calls)

    async def run(self, emit: EmitOf, ended: EndedOf) -> None:
        """Follow all samples to their ends; their pieces come as they are committed.

        `emit` and `ended` raise `ClientGoneError` when there is nobody to tell.

        Raises:
            OutriderError: a sample failed; the others are closed.
            ClientGoneError: all are closed.
        """
        tasks = [
            asyncio.create_task(self._follow(index, session, emit, ended))
            for index, session in enumerate(self.started)
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            errors = {task: task.exception() for task in tasks if not task.cancelled()}
        for task in tasks:
            error = errors.get(task)
            if task in done and error is not None:
                raise error

    async def close(self) -> None:
        """End what is left of the samples and give up the id."""
        try:
            for session in self.started:
                await self._sessions.end(session, FinishReason.CANCELLED)
        finally:
            if self._claimed:
                self._sessions.release(self.session_id)

    async def _follow(
        self, index: int, session: RunningSession, emit: EmitOf, ended: EndedOf
    ) -> None:
        async def emit_here(offset: int, pieces: list[Piece]) -> None:
            await emit(index, offset, pieces)

        # What is left if this task is cancelled: the client has gone, or another one failed.
        reason = FinishReason.CANCELLED
        try:
            reason = await session.run(emit_here)
        except ClientGoneError:
            raise
        except Exception:
            reason = FinishReason.ERROR
            raise
        finally:
            await self._sessions.end(session, reason)
        await ended(index, session, reason)
