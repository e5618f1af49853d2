"""The one writer of session records: keeps what Redis holds in step with the journals here.

Whatever waits to be written goes in one batch, and what comes meanwhile in the next: under load a
batch carries the appends of many sessions, and each waits for one round trip at most before its
own. While Redis does not answer, sessions go on from memory; their journals are written once it
is back.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from coordinator.journal import Journal
from outrider import logs
from outrider.errors import OutriderError, RecordsUnavailableError
from outrider.session.leases import note_running
from outrider.session.names import PROBE_KEY
from outrider.session.redis import Redis, Script, ScriptCall

# A batch of so many keeps Redis busy for about a millisecond.
MOST_A_BATCH = 200
# How often sessions are looked through for leases to renew.
LOOK_S = 0.5
# How often it is looked whether Redis has said whose a session is, while it does not answer.
CONFIRM_S = 0.1
# Of a lease, after which it is renewed.
RENEW_SHARE = 0.2
# A write, since a Redis that is full still reads.
_PROBE = ScriptCall(Script("return redis.call('SET', KEYS[1], '', 'PX', 1000)"), [PROBE_KEY])


@dataclass(slots=True)
class _Batch:
    """Calls and the journals that they are of; `renewed` are those whose lease they renew."""

    journals: list[Journal] = field(default_factory=list)
    calls: list[ScriptCall] = field(default_factory=list)
    renewed: list[Journal] = field(default_factory=list)


class LogWriter:
    """Writes journals now if Redis answers, and later if not; `start` first, `close` last."""

    def __init__(self, redis: Redis, *, lease_s: float) -> None:
        self.reachable = True
        self._redis = redis
        self._renew_s = lease_s * RENEW_SHARE
        # Journals to look at, in the order in which they asked.
        self._behind: dict[Journal, None] = {}
        # Those that Redis refused to write, until the next `catch_up`.
        self._aside: dict[Journal, None] = {}
        self._under_way: list[Journal] = []
        self._waiting: dict[Journal, list[asyncio.Future[None]]] = {}
        # Those whose leases are renewed, and when they were last.
        self._renewed_at: dict[Journal, float] = {}
        self._wake = asyncio.Event()
        self._turn = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._log = logs.get(__name__)

    def start(self) -> None:
        """Begin to write."""
        self._tasks = [asyncio.create_task(self._write_all()), asyncio.create_task(self._renew())]

    async def close(self) -> None:
        """Write what is behind if Redis answers, and write no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._behind.update(self._aside)
        while self.reachable and self._behind:
            await self._write_batch(self._take())
        self._release(list(self._waiting))

    def later(self, journal: Journal) -> None:
        """Write the journal with the next batch."""
        self._behind[journal] = None
        self._wake.set()

    async def create(self, journal: Journal) -> None:
        """Write the journal of a new session.

        Raises:
            SessionExistsError: the id is in use.
            RecordsUnavailableError: Redis does not answer; the session may be there all the same.
        """
        if not self.reachable:
            raise RecordsUnavailableError(
                "Redis does not answer, so no new session can be recorded; try again later"
            )
        await self._written(journal)
        if journal.lost is not None:
            raise journal.lost
        if not journal.runs:
            raise RecordsUnavailableError(
                "Redis did not record the session; check --redis-url and that the server is up"
            )

    async def write(self, journal: Journal) -> None:
        """Write the journal, or leave it for later while Redis does not answer.

        Raises:
            FencedError: another coordinator has taken the session.
        """
        await self._written(journal)
        if journal.lost is not None:
            raise journal.lost

    async def confirm(self, journal: Journal, give_up: Callable[[], bool]) -> None:
        """Wait until Redis has said that the session is ours still, or `give_up` is true.

        It is asked now, and as often as it takes until it answers.

        Raises:
            FencedError: another coordinator has taken the session.
        """
        journal.ask()
        while journal.unsure and not give_up():
            await self._written(journal)
            if journal.unsure:
                await asyncio.sleep(CONFIRM_S)
        if journal.lost is not None:
            raise journal.lost

    async def hand_over(self, session_id: str) -> None:
        """Write what is still to be written of a session that is taken over here; then no more.

        Raises:
            RecordsUnavailableError: that can't be done now.
        """
        known = (*self._behind, *self._aside, *self._under_way)
        former = {journal: None for journal in known if journal.session_id == session_id}
        for journal in former:
            await self._written(journal)
            if journal.behind:
                raise RecordsUnavailableError(
                    f"Redis does not answer, and lacks the end of session {session_id!r}; try "
                    "again later"
                )
            journal.give_up()

    async def catch_up(self) -> None:
        """Try what is behind, now that Redis may answer again."""
        async with self._turn:
            self._behind.update(self._aside)
            self._aside.clear()
            # What comes meanwhile is left to the writer.
            for _ in range(len(self._behind) // MOST_A_BATCH + 1):
                if not await self._write_batch(self._take()):
                    return
        self._wake.set()

    def unreachable(self, why: str) -> None:
        """Let nobody wait for Redis until a `catch_up` succeeds."""
        if self.reachable:
            self._log.warning("going on without Redis", error=why)
        self.reachable = False
        self._release(list(self._waiting))

    async def _written(self, journal: Journal) -> None:
        if not journal.behind:
            return
        self.later(journal)
        if self.reachable:
            done = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(journal, []).append(done)
            await done

    async def _write_all(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if not self.reachable:
                continue
            async with self._turn:
                try:
                    await self._write_batch(self._take())
                except Exception:
                    self._log.exception("writing the logs failed")
                    self.unreachable("a fault of the coordinator")
            if self._behind:
                self._wake.set()

    def _take(self) -> _Batch:
        """What is to be said next, at most one thing a journal."""
        batch = _Batch()
        now = time.monotonic()
        for journal in list(self._behind):
            if len(batch.calls) == MOST_A_BATCH:
                break
            del self._behind[journal]
            self._aside.pop(journal, None)
            renewed_at = self._renewed_at.get(journal)
            renew = renewed_at is None or now - renewed_at >= self._renew_s
            call = journal.due(renew=renew)
            if call is None:
                self._release([journal])
                continue
            batch.journals.append(journal)
            batch.calls.append(call)
            if renew:
                batch.renewed.append(journal)
        return batch

    async def _write_batch(self, batch: _Batch) -> bool:
        """Send it and hand the replies to the journals; False when Redis carries nothing out."""
        if not batch.calls and self.reachable:
            return True
        calls = batch.calls or [_PROBE]
        if batch.renewed:
            calls = [*calls, note_running([journal.session_id for journal in batch.renewed])]
        self._under_way = batch.journals
        try:
            replies = await self._redis.run_all(calls)
        except RecordsUnavailableError as error:
            replies = [error] * len(calls)
        except asyncio.CancelledError:
            for journal in batch.journals:
                journal.doubt()
                self._behind[journal] = None
            raise
        finally:
            self._under_way = []
        for journal, reply in zip(batch.journals, replies, strict=False):
            self._take_reply(journal, reply)
        failures = [reply for reply in replies if isinstance(reply, OutriderError)]
        if len(failures) == len(calls):
            self.unreachable(failures[0].message)
            return False
        now = time.monotonic()
        self._renewed_at.update((journal, now) for journal in batch.renewed if journal.runs)
        if not self.reachable:
            self._log.info("Redis is back", sessions_behind=len(self._behind))
        self.reachable = True
        return True

    def _take_reply(self, journal: Journal, reply: Any) -> None:
        if isinstance(reply, OutriderError):
            journal.doubt()
            self._aside[journal] = None
        else:
            try:
                journal.answered(reply)
            except Exception:
                self._log.exception("can't read a reply", session_id=journal.session_id)
                journal.doubt()
                self._aside[journal] = None
            if journal.behind and journal not in self._aside:
                self._behind[journal] = None
                return
        self._release([journal])

    async def _renew(self) -> None:
        """Have leases renewed that need it, and forget those of sessions that do not run."""
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            for journal, renewed_at in list(self._renewed_at.items()):
                if not journal.runs:
                    del self._renewed_at[journal]
                elif now - renewed_at >= self._renew_s:
                    self.later(journal)

    def _release(self, journals: Iterable[Journal]) -> None:
        for journal in journals:
            for done in self._waiting.pop(journal, ()):
                if not done.done():
                    done.set_result(None)
