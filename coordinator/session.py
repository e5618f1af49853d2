"""One running session: placed, followed, placed again when its verify worker goes, ended or paused.

Events that carry another epoch, or do not continue the session's length, are dropped: that
makes every token come exactly once, whatever workers and streams do.
"""

import asyncio
import time
from collections.abc import Sequence

from coordinator.commit import CommitStep, Piece, logprobs_of
from coordinator.decode_link import DecodeLink, LinkLost
from coordinator.drafter_choice import DrafterChoice
from coordinator.journal import Journal
from coordinator.services import Services
from coordinator.session_events import Emit, Event, Move, Stop
from outrider import logs
from outrider.errors import (
    FencedError,
    InternalError,
    OutriderError,
    OverloadedError,
    UnavailableError,
)
from outrider.messages import (
    AssignDrafter,
    CloseSession,
    DrafterLost,
    Endings,
    FinishReason,
    Progress,
    SessionEnded,
    SessionFailed,
    StartSession,
)
from outrider.session.record import SessionState
from outrider.session.registry import WorkerRecord

# Placements in a row without a token; a request that fells its workers has failed then.
MAX_FRUITLESS_PLACEMENTS = 6
# By this much the epoch rises above one that a verify worker has and Redis has forgotten.
EPOCH_LEAP = 1000


class RunningSession:
    """A session that this coordinator runs: `place` once, then `run`, and `close` at any time.

    `commit` and `journal` hold the tokens; `traceparent` is passed on to the verify worker. One
    that was taken over has a `backlog`, the pieces of the tokens in its log. If these end it, it
    needs no place.
    """

    def __init__(
        self,
        services: Services,
        journal: Journal,
        commit: CommitStep,
        *,
        stop_ids: frozenset[int],
        traceparent: str = "",
        backlog: Sequence[Piece] = (),
    ) -> None:
        self.session_id = journal.session_id
        self.journal = journal
        self.commit = commit
        self.first_token_at: float | None = None
        self._services = services
        self._stop_ids = stop_ids
        self._traceparent = traceparent
        self._backlog = list(backlog)
        # Had it ended before it came here, nothing about it is left to note.
        self._over = journal.record.state is SessionState.FINISHED
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._put_back: Event | None = None
        self._epoch = journal.record.epoch
        self._link: DecodeLink | None = None
        self._drafter = DrafterChoice(services.pool, journal.record.speculation)
        self._refused: set[str] = set()
        self._fruitless = 0
        self._stopped: Stop | None = None
        self._closed = False
        self._log = logs.get(__name__).bind(session_id=self.session_id)
        journal.on_lost = self._stop

    @property
    def tenant(self) -> str:
        """Whose session it is."""
        return self.journal.record.tenant

    async def place(self) -> None:
        """Start on a verify worker under the next epoch, from the committed tokens.

        Raises:
            NoVerifyWorkerError, OverloadedError: no verify worker takes the session.
            InternalError: several verify workers in a row went away with it.
            FencedError: another coordinator has taken the session.
        """
        if self.commit.finish_reason is not None:
            return
        self._leave()
        if self._fruitless >= MAX_FRUITLESS_PLACEMENTS:
            raise InternalError(
                f"session {self.session_id} felled {self._fruitless} verify workers in a row"
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
        self._drafter.take(self._drafter.choose())
        self.journal.place(
            epoch=self._epoch,
            target=link.worker.identity,
            verify_worker_id=link.worker.worker_id,
            draft_worker_id=self._drafter.worker_id,
        )
        await services.writer.write(self.journal)
        # If the link was lost meanwhile, the inbox says so; if the session was closed, the
        # link is no longer its own.
        if self._link is link:
            link.send(self._start())
            self._log.info("placed", epoch=self._epoch, worker_id=link.worker.worker_id)

    async def run(self, emit: Emit) -> FinishReason:
        """Follow the session to its end and hand out what is committed, logged first.

        A backlog comes first.

        Raises:
            OutriderError: the session failed, or it was stopped with an error.
        """
        pieces, self._backlog = self._backlog, []
        offset = 0
        while True:
            reason = self.commit.finish_reason
            if reason is not None:
                self._leave()
                self.journal.finish(reason)
            if pieces or reason is not None:
                await self._services.writer.write(self.journal)
            if pieces and not self.journal.cancelled_elsewhere:
                self.first_token_at = self.first_token_at or time.monotonic()
                await emit(offset, pieces)
            if reason is not None:
                failure = self.journal.record.failure
                if failure is not None:
                    raise failure.error
                return reason
            offset = len(self.commit.token_ids)
            pieces = await self._next_pieces()

    def stop(self) -> bool:
        """Cancel the session at once; its workers are told now.

        False when it has ended, or is being paused: then its record has to be cancelled.
        """
        if self._closed or self._stopped is not None or self.commit.finish_reason is not None:
            return False
        self.journal.finish(FinishReason.CANCELLED)
        self._services.writer.later(self.journal)
        self._stop(None)
        return True

    def pause(self, error: OutriderError) -> None:
        """Give the session up at once, to be resumed; whoever follows it is told `error`."""
        if self._stopped is None and self.commit.finish_reason is None:
            self.journal.pause()
            self._services.writer.later(self.journal)
            self._stop(error)

    def move(self) -> None:
        """Place the session on another verify worker if there is one that takes it."""
        if self._link is not None:
            self._inbox.put_nowait(Move(self._link))

    async def close(self, reason: FinishReason | None, error: OutriderError | None = None) -> None:
        """Free what the session holds at its workers; the first call counts.

        Unless it has ended by itself, `reason` is noted, and `error` with it; None pauses it.
        """
        if self._closed:
            return
        self._closed = True
        self._leave()
        if self._over:
            return
        if reason is None:
            self.journal.pause()
        else:
            self.commit.end(reason)
            self.journal.finish(reason, error)
        ended_as = self.journal.record.finish_reason
        if ended_as is not None:
            self._services.figures.finished(ended_as)
        else:
            self._services.figures.paused()
        try:
            await self._services.writer.write(self.journal)
        except FencedError as fenced:
            self._log.info("the session is another's now", why=fenced.message)

    def check_drafter(self) -> None:
        """Take another draft worker if the session has none, or if its own is gone or bad."""
        if self._link is not None and not self._drafter.is_good:
            chosen = self._drafter.choose()
            if chosen is not None or self._drafter.is_bad:
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
            case Stop():
                pass  # `run` looks at the flag
            case Move():
                await self._moved(event)
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
            self.commit.cached_tokens = self.journal.cached_tokens = event.cached_tokens
        figures = self.commit.figures
        drafted, accepted = figures.draft_tokens, figures.accepted_tokens
        record = self.journal.record
        logprobs = logprobs_of(event, record.verify_worker_id, wanted=record.logprobs is not None)
        pieces = self.commit.commit(event.token_ids, event.origins, event.draft_tokens, logprobs)
        if pieces:
            self._fruitless = 0
            self.journal.extend(
                [piece.token_id for piece in pieces],
                [piece.logprobs for piece in pieces if piece.logprobs is not None],
            )
            self._services.figures.committed(
                len(pieces), figures.draft_tokens - drafted, figures.accepted_tokens - accepted
            )
        return pieces

    async def _ended(self, event: SessionEnded) -> None:
        if event.reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.commit.end(event.reason)
        else:
            self._log.warning("the verify worker gave the session up", reason=event.reason.value)
            await self.place()

    async def _moved(self, event: Move) -> None:
        if event.link is not self._link:
            return  # it has moved already
        here = event.link.worker.worker_id
        try:
            other = self._services.pool.choose_link(
                {*self._refused, here}, self.journal.record.target
            )
        except OverloadedError:
            other = None
        if other is not None:
            self._log.info("moving", worker_id=here)
            self._fruitless -= 1
            await self.place()

    async def _failed(self, event: SessionFailed) -> None:
        if isinstance(event.error, FencedError):
            await self._displaced(event.error)
            return
        if not isinstance(event.error, OverloadedError | UnavailableError):
            raise event.error
        self._log.warning("the verify worker refused the session", error=event.error.message)
        if isinstance(event.error, OverloadedError) and self._link is not None:
            self._refused.add(self._link.worker.worker_id)
            self._fruitless -= 1
        elif self._link is not None and self._link.draining:
            self._fruitless -= 1  # it takes nobody, and gets nobody from now on
        await self.place()

    async def _displaced(self, error: FencedError) -> None:
        """A worker knows a higher epoch of the session: another's, or one that Redis has lost.

        Which it is only Redis can say. Until it does, the session stays where it may be another's.
        """
        self._log.warning("the verify worker has a higher epoch", error=error.message)
        self._leave()
        await self._services.writer.confirm(self.journal, lambda: self._stopped is not None)
        if self._stopped is None:
            self._epoch += EPOCH_LEAP
            await self.place()

    def _drafter_lost(self, event: DrafterLost) -> None:
        if not self._drafter.note_lost(event):
            return  # another one was assigned meanwhile
        self._log.warning("draft worker lost", worker_id=event.worker_id, error=event.error.message)
        chosen = self._drafter.choose()
        if chosen is not None:
            self._assign(chosen)
        else:
            self._note_drafter(None)

    def _assign(self, drafter: WorkerRecord | None) -> None:
        assert self._link is not None
        self._note_drafter(drafter)
        self._link.send(
            AssignDrafter(session_id=self.session_id, epoch=self._epoch, drafter=self._drafter.ref)
        )
        self._log.info("draft worker assigned", worker_id=self._drafter.worker_id)

    def _note_drafter(self, drafter: WorkerRecord | None) -> None:
        self._drafter.take(drafter)
        self.journal.assign(self._drafter.worker_id)
        self._services.writer.later(self.journal)

    def _stop(self, error: OutriderError | None) -> None:
        """End it with `error`, or as cancelled; Redis may tell that this was done elsewhere."""
        if self._stopped is None:
            self._stopped = Stop(error)
            self._leave()
            self._inbox.put_nowait(self._stopped)
            self._services.pool.wake()

    def _leave(self) -> None:
        """Free what the session holds at its workers."""
        if self._link is not None:
            self._link.detach(self.session_id)
            self._link.send(CloseSession(session_id=self.session_id, epoch=self._epoch))
            self._link = None
        self._drafter.take(None)

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
            drafter=self._drafter.ref,
            logprobs=record.logprobs,
            traceparent=self._traceparent,
            tenant=record.tenant,
        )
