"""Keeps what Redis holds about the sessions here in step with memory.

A journal is one session: memory says what should be in Redis, and `write` brings Redis from
what it holds to that, in order: epoch, tokens, finish. While Redis does not answer, sessions
go on from memory; the keeper writes the journals that are behind once it is back. After a
failed write nobody knows whether it was carried out, so the next one asks first. When Redis
came back empty, the session is written again, whole.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from outrider import logs
from outrider.errors import (
    FencedError,
    RecordsUnavailableError,
    SessionExistsError,
    UnknownSessionError,
)
from outrider.messages import FinishReason
from outrider.session.identity import ModelIdentity
from outrider.session.records import Position, SessionRecord, SessionRecords, SessionState

ATTEMPTS = 3
UNKNOWN = "?"  # no worker's id


class Journal:
    """The record and token log of one session that runs here."""

    def __init__(
        self, records: SessionRecords, record: SessionRecord, prompt: Sequence[int]
    ) -> None:
        self.record = record
        self.token_ids = list(prompt)
        self._records = records
        self._lock = asyncio.Lock()
        self._created = False
        # What Redis holds; None when that is not known.
        self._held: Position | None = None
        self._held_draft_worker_id = UNKNOWN
        self._fenced: FencedError | None = None

    @property
    def session_id(self) -> str:
        """The session's id."""
        return self.record.session_id

    def extend(self, token_ids: Sequence[int]) -> None:
        """Note committed tokens."""
        self.token_ids.extend(token_ids)

    def place(
        self,
        *,
        epoch: int,
        target: ModelIdentity,
        verify_worker_id: str,
        draft_worker_id: str,
    ) -> None:
        """Note a placement under a higher epoch."""
        self.record = replace(
            self.record,
            epoch=epoch,
            target=target,
            verify_worker_id=verify_worker_id,
            draft_worker_id=draft_worker_id,
        )

    def assign(self, draft_worker_id: str) -> None:
        """Note another draft worker."""
        self.record = replace(self.record, draft_worker_id=draft_worker_id)

    def finish(self, reason: FinishReason) -> None:
        """Note the end; the first reason stays."""
        if self.record.state is SessionState.RUNNING:
            self.record = replace(self.record, state=SessionState.FINISHED, finish_reason=reason)

    @property
    def behind(self) -> bool:
        """Whether Redis holds something else than it should."""
        draft_worker_id = self.record.draft_worker_id
        return self._held != self._wanted() or self._held_draft_worker_id != draft_worker_id

    async def create(self) -> None:
        """Write the new session.

        Raises:
            SessionExistsError: the id is in use.
            RecordsUnavailableError: Redis does not answer.
        """
        await _to_the_end(self._create())

    async def write(self) -> None:
        """Bring Redis up to date; does nothing when it is.

        Raises:
            FencedError: another coordinator has taken the session.
            RecordsUnavailableError: Redis does not answer; write again later.
        """
        await _to_the_end(self._write())

    async def _create(self) -> None:
        """Write the session whole; for a finished one the end is left to do."""
        running = replace(self.record, state=SessionState.RUNNING, finish_reason=None)
        token_ids = tuple(self.token_ids)
        await self._records.create(running, token_ids)
        self._created = True
        self._held = Position(running.owner, running.epoch, len(token_ids), running.state)
        self._held_draft_worker_id = running.draft_worker_id

    async def _write(self) -> None:
        async with self._lock:
            if self._fenced is not None:
                raise self._fenced
            try:
                for _ in range(ATTEMPTS - 1):
                    with suppress(FencedError, UnknownSessionError):
                        return await self._catch_up()
                    # What was sent before a failure may have been carried out only now.
                    self._held = None
                await self._catch_up()
            except RecordsUnavailableError:
                self._held = None
                raise
            except (FencedError, SessionExistsError, UnknownSessionError) as error:
                self._fenced = FencedError(f"the record was lost: {error.message}")
                raise self._fenced from error

    async def _catch_up(self) -> None:
        held = self._held or await self._ask()
        if held is None:
            if not self._created:
                self._settle()  # the session never began; there is nothing to end
                return
            await self._create()  # Redis came back empty
            held = self._held
            assert held is not None
        if held.state is SessionState.FINISHED:
            self._settle()
            return
        record, token_ids = self.record, tuple(self.token_ids)
        if held.epoch < record.epoch:
            await self._records.raise_epoch(
                self.session_id,
                held=held.epoch,
                epoch=record.epoch,
                owner=record.owner,
                target=record.target,
                verify_worker_id=record.verify_worker_id,
                draft_worker_id=record.draft_worker_id,
            )
        elif self._held_draft_worker_id != record.draft_worker_id:
            await self._records.assign(
                self.session_id, epoch=record.epoch, draft_worker_id=record.draft_worker_id
            )
        if held.length != len(token_ids):
            await self._records.append(
                self.session_id,
                epoch=record.epoch,
                base_len=held.length,
                token_ids=token_ids[held.length :],
            )
        if record.finish_reason is not None:
            await self._records.finish(
                self.session_id, epoch=record.epoch, reason=record.finish_reason
            )
        self._held = Position(record.owner, record.epoch, len(token_ids), record.state)
        self._held_draft_worker_id = record.draft_worker_id

    def _settle(self) -> None:
        self._held = self._wanted()
        self._held_draft_worker_id = self.record.draft_worker_id

    async def _ask(self) -> Position | None:
        """What Redis holds, after it became doubtful."""
        held = await self._records.position(self.session_id)
        self._held_draft_worker_id = UNKNOWN
        if held is None:
            return None
        ours = held.owner == self.record.owner and held.epoch <= self.record.epoch
        if not ours or held.length > len(self.token_ids):
            raise FencedError(
                f"session {self.session_id} is at {held.length} tokens and epoch {held.epoch} "
                f"of coordinator {held.owner}"
            )
        self._created = True
        return held

    def _wanted(self) -> Position:
        record = self.record
        return Position(record.owner, record.epoch, len(self.token_ids), record.state)


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end even when the caller is cancelled, who then waits for it.

    Otherwise a write that is still on its way could overtake the one that follows.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # the cancellation is what the caller is told
        raise


class RecordKeeper:
    """Writes journals now if Redis answers, and later if not."""

    def __init__(self) -> None:
        self.reachable = True
        self._behind: dict[str, Journal] = {}
        self._log = logs.get(__name__)

    def later(self, journal: Journal) -> None:
        """Write the journal at the next `catch_up`."""
        self._behind[journal.session_id] = journal

    async def write(self, journal: Journal) -> None:
        """Write the journal, or leave it for later while Redis does not answer.

        Raises:
            FencedError: another coordinator has taken the session.
        """
        self.later(journal)
        if not self.reachable:
            return
        try:
            await journal.write()
        except RecordsUnavailableError as error:
            self.later(journal)
            if self.reachable:
                self._log.warning("going on without Redis", error=error.message)
            self.reachable = False
        except FencedError:
            self._behind.pop(journal.session_id, None)
            raise
        else:
            if not journal.behind:
                self._behind.pop(journal.session_id, None)

    async def catch_up(self) -> None:
        """Write the journals that are behind, now that Redis answers."""
        if not self.reachable:
            self._log.info("Redis is back", sessions_behind=len(self._behind))
        self.reachable = True
        for journal in list(self._behind.values()):
            try:
                await self.write(journal)
            except FencedError as error:
                self._log.error(
                    "can't keep a record", session_id=journal.session_id, error=error.message
                )
            if not self.reachable:
                return
