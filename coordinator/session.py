"""One running session: placed, followed, placed again when its verify worker goes, ended.

Events that carry another epoch, or do not continue the session's length, are dropped: that
makes every token come exactly once, whatever workers and streams do.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from coordinator.commit import CommitStep, Piece
from coordinator.decode_link import DecodeLink, LinkLost
from coordinator.figures import Figures
from coordinator.journal import Journal, RecordKeeper
from coordinator.pool import WorkerPool
from outrider import logs
from outrider.errors import (
    FencedError,
    InternalError,
    InvalidRequestError,
    OutriderError,
    OverloadedError,
    UnavailableError,
)
from outrider.messages import (
    AcceptanceRule,
    AssignDrafter,
    CloseSession,
    DecodeEvent,
    DrafterLost,
    Endings,
    FinishReason,
    Progress,
    SessionEnded,
    SessionFailed,
    StartSession,
    TokenLogprobs,
)
from outrider.session.registry import WorkerRecord

# Placements in a row that brought no token; a request that fells its workers ends here.
MAX_FRUITLESS_PLACEMENTS = 3
# A draft worker that was lost may be tried again after this long.
DRAFTER_RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class _Stop:
    """Ends the session from outside: as cancelled, or with an error."""

    error: OutriderError | None


Event: TypeAlias = DecodeEvent | LinkLost | _Stop
# (completion tokens before the pieces, pieces)
Emit: TypeAlias = Callable[[int, list[Piece]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Services:
    """What sessions share.

    `place_wait_s` and `replace_wait_s`: how long a new session, and one that was on a verify
    worker before, waits for one.
    """

    pool: WorkerPool
    keeper: RecordKeeper
    figures: Figures
    place_wait_s: float
    replace_wait_s: float


class RunningSession:
    """A session that this coordinator runs: `place` once, then `run`, and `close` at any time.

    `commit` and `journal` hold the tokens; `traceparent` is passed on to the verify worker.
    """

    def __init__(
        self,
        services: Services,
        journal: Journal,
        commit: CommitStep,
        *,
        stop_ids: frozenset[int],
        traceparent: str = "",
    ) -> None:
        self.session_id = journal.session_id
        self.journal = journal
        self.commit = commit
        self.first_token_at: float | None = None
        self._services = services
        self._stop_ids = stop_ids
        self._traceparent = traceparent
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._put_back: Event | None = None
        self._epoch = journal.record.epoch
        self._link: DecodeLink | None = None
        self._drafter: WorkerRecord | None = None
        # When the session lost each (draft worker, incarnation).
        self._lost: dict[tuple[str, str], float] = {}
        self._refused: set[str] = set()
        self._fruitless = 0
        self._stopped: _Stop | None = None
        self._closed = False
        self._log = logs.get(__name__).bind(session_id=self.session_id)

    async def place(self) -> None:
        """Start on a verify worker under the next epoch, from the committed tokens.

        Raises:
            NoVerifyWorkerError, OverloadedError: no verify worker takes the session.
            UnavailableError: several verify workers in a row went away with it.
            FencedError: another coordinator has taken the session.
        """
        self._leave()
        if self._fruitless >= MAX_FRUITLESS_PLACEMENTS:
            raise UnavailableError(
                f"session {self.session_id} lost {self._fruitless} verify workers in a row "
                "without a new token; see the verify workers' logs"
            )
        self._fruitless += 1
        services = self._services
        # What a client has got already is worth a longer wait than a new request.
        running = self._epoch > 0
        link = await services.pool.wait_for_link(
            services.replace_wait_s if running else services.place_wait_s,
            exclude=self._refused,
            give_up=lambda: self._stopped is not None,
            for_room=running,
            token_ids=self.journal.token_ids,
            target=self.journal.record.target,
        )
        if link is None:
            return  # stopped; `run` sees it
        self._epoch += 1
        self._link = link
        link.attach(self.session_id, self._inbox.put_nowait)
        self._take_drafter(self._choose_drafter())
        self.journal.place(
            epoch=self._epoch,
            target=link.worker.identity,
            verify_worker_id=link.worker.worker_id,
            draft_worker_id=self._drafter.worker_id if self._drafter else "",
        )
        await services.keeper.write(self.journal)
        # If the link was lost meanwhile, the inbox says so; if the session was closed, the
        # link is no longer its own.
        if self._link is link:
            link.send(self._start())
            self._log.info("placed", epoch=self._epoch, worker_id=link.worker.worker_id)

    async def run(self, emit: Emit) -> FinishReason:
        """Follow the session to its end and hand out what is committed, logged first.

        Raises:
            OutriderError: the session failed, or it was stopped with an error.
        """
        while True:
            offset = len(self.commit.token_ids)
            pieces = await self._next_pieces()
            reason = self.commit.finish_reason
            if reason is not None:
                self._leave()
                self.journal.finish(reason)
            if pieces or reason is not None:
                await self._services.keeper.write(self.journal)
            if pieces:
                self.first_token_at = self.first_token_at or time.monotonic()
                await emit(offset, pieces)
            if reason is not None:
                return reason

    def stop(self, error: OutriderError | None = None) -> None:
        """End the session at once: as cancelled, or with `error`. Its workers are told now."""
        if self._stopped is None and self.commit.finish_reason is None:
            self._stopped = _Stop(error)
            self._leave()
            reason = FinishReason.CANCELLED if error is None else FinishReason.ERROR
            self.journal.finish(reason)
            self._services.keeper.later(self.journal)
            self._inbox.put_nowait(self._stopped)
            self._services.pool.wake()

    async def close(self, reason: FinishReason) -> None:
        """Free what the session holds at its workers and end its record; the first call counts.

        `reason` is noted unless the session has ended by itself.
        """
        if self._closed:
            return
        self._closed = True
        self._leave()
        self.commit.end(reason)
        self.journal.finish(reason)
        self._services.figures.finished(self.journal.record.finish_reason or reason)
        try:
            await self._services.keeper.write(self.journal)
        except FencedError as error:
            self._log.warning("the record is no longer ours", error=error.message)

    def check_drafter(self) -> None:
        """Take another draft worker if the session has none, or if its own is gone or bad."""
        pool, held = self._services.pool, self._drafter
        bad = held is not None and pool.is_quarantined(held)
        if self._link is None or (held is not None and pool.is_up(held) and not bad):
            return
        chosen = self._choose_drafter()
        if chosen is not None or bad:
            self._assign(chosen)

    async def _next_pieces(self) -> list[Piece]:
        """Handle the next event, and with it all the progress that is there already."""
        pieces: list[Piece] = []
        event = self._put_back or await self._inbox.get()
        self._put_back = None
        while self._stopped is None:
            if pieces and not isinstance(event, Progress):
                # What it asks for may take long; the pieces must not wait for it.
                self._put_back = event
                return pieces
            pieces += await self._handle(event)
            if self.commit.finish_reason is not None or self._inbox.empty():
                return pieces
            event = self._inbox.get_nowait()
        if self._stopped.error is not None:
            raise self._stopped.error
        self.commit.end(FinishReason.CANCELLED)
        return pieces

    async def _handle(self, event: Event) -> list[Piece]:
        match event:
            case LinkLost():
                if event.link is self._link:
                    self._log.warning("verify worker lost", why=event.why, epoch=self._epoch)
                    await self.place()
            case _Stop():
                pass  # `run` looks at the flag
            case _ if event.epoch != self._epoch:
                self._log.warning("event of another epoch", epoch=event.epoch, now=self._epoch)
            case Progress():
                return await self._progress(event)
            case SessionEnded():
                await self._ended(event)
            case SessionFailed():
                await self._failed(event)
            case DrafterLost():
                self._drafter_lost(event)
        return []

    async def _progress(self, event: Progress) -> list[Piece]:
        length = len(self.journal.token_ids)
        if event.base_len != length:
            self._log.warning("event at another base_len", base_len=event.base_len, length=length)
            if event.base_len > length:
                # Tokens are missing, so nothing that follows can fit either.
                await self.place()
            return []
        if not self.commit.token_ids:
            self.commit.cached_tokens = event.cached_tokens
        figures = self.commit.figures
        drafted, accepted = figures.draft_tokens, figures.accepted_tokens
        pieces = self.commit.commit(
            event.token_ids, event.origins, event.draft_tokens, self._logprobs(event)
        )
        if pieces:
            self._fruitless = 0
            self.journal.extend([piece.token_id for piece in pieces])
            self._services.figures.committed(
                len(pieces), figures.draft_tokens - drafted, figures.accepted_tokens - accepted
            )
        return pieces

    def _logprobs(self, event: Progress) -> tuple[TokenLogprobs, ...]:
        """One for each token if they are wanted, else none."""
        if self.journal.record.logprobs is None:
            return ()
        if len(event.logprobs) != len(event.token_ids):
            worker_id = self.journal.record.verify_worker_id
            raise InternalError(
                f"verify worker {worker_id} sent tokens of session {self.session_id} without "
                "the logprobs that were asked for; is it of an older version?"
            )
        return event.logprobs

    async def _ended(self, event: SessionEnded) -> None:
        if event.reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.commit.end(event.reason)
        else:
            self._log.warning("the verify worker gave the session up", reason=event.reason.value)
            await self.place()

    async def _failed(self, event: SessionFailed) -> None:
        if not isinstance(event.error, OverloadedError | UnavailableError):
            raise event.error
        self._log.warning("the verify worker refused the session", error=event.error.message)
        if isinstance(event.error, OverloadedError) and self._link is not None:
            self._refused.add(self._link.worker.worker_id)
            self._fruitless -= 1
        await self.place()

    def _drafter_lost(self, event: DrafterLost) -> None:
        lost = self._drafter
        if lost is None or lost.worker_id != event.worker_id:
            return  # another one was assigned meanwhile
        self._log.warning("draft worker lost", worker_id=event.worker_id, error=event.error.message)
        self._lost[lost.worker_id, lost.incarnation] = time.monotonic()
        if isinstance(event.error, InvalidRequestError):
            self._services.pool.quarantine(lost, event.error.message)
        chosen = self._choose_drafter()
        if chosen is not None:
            self._assign(chosen)
        else:
            self._note_drafter(None)

    def _assign(self, drafter: WorkerRecord | None) -> None:
        assert self._link is not None
        self._note_drafter(drafter)
        self._link.send(
            AssignDrafter(
                session_id=self.session_id,
                epoch=self._epoch,
                drafter=self._services.pool.ref(drafter) if drafter else None,
            )
        )
        self._log.info("draft worker assigned", worker_id=drafter.worker_id if drafter else "")

    def _note_drafter(self, drafter: WorkerRecord | None) -> None:
        self._take_drafter(drafter)
        self.journal.assign(drafter.worker_id if drafter else "")
        self._services.keeper.later(self.journal)

    def _choose_drafter(self) -> WorkerRecord | None:
        speculation = self.journal.record.speculation
        if not speculation.enabled:
            return None
        now = time.monotonic()
        recent = {key for key, lost_at in self._lost.items() if now - lost_at < DRAFTER_RETRY_S}
        # Under the rejection rule a q that is not what it says would bend the law of the output.
        trusted_only = speculation.rule is AcceptanceRule.REJECTION
        return self._services.pool.choose_draft_worker(recent, trusted_only=trusted_only)

    def _take_drafter(self, drafter: WorkerRecord | None) -> None:
        drafted = self._services.pool.drafted
        if self._drafter is not None:
            drafted[self._drafter.worker_id] -= 1
        if drafter is not None:
            drafted[drafter.worker_id] += 1
        self._drafter = drafter

    def _leave(self) -> None:
        """Free what the session holds at its workers."""
        if self._link is not None:
            self._link.detach(self.session_id)
            self._link.send(CloseSession(session_id=self.session_id, epoch=self._epoch))
            self._link = None
        self._take_drafter(None)

    def _start(self) -> StartSession:
        record = self.journal.record
        return StartSession(
            session_id=self.session_id,
            epoch=self._epoch,
            token_ids=tuple(self.journal.token_ids),
            prompt_len=record.prompt_len,
            sampling=record.sampling,
            endings=Endings(self.commit.limits.max_new_tokens, self._stop_ids),
            speculation=record.speculation,
            drafter=self._services.pool.ref(self._drafter) if self._drafter else None,
            logprobs=record.logprobs,
            traceparent=self._traceparent,
        )
