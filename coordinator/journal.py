"""What Redis should hold about one session, and what has to be said to bring it there: no I/O.

Memory says what should be there; a journal says what to write next (`due`) and takes the reply
(`answered`). Everything that is new goes in one write: placement, tokens, end. After a write whose
answer was lost nobody knows whether it was carried out, so the next call asks. When Redis came
back empty, the session is written again, whole.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from outrider.errors import FencedError, OutriderError, SessionExistsError
from outrider.figures import SpeculationFigures
from outrider.messages import FinishReason, TokenLogprobs
from outrider.session.identity import ModelIdentity
from outrider.session.record import (
    Failure,
    Fields,
    SessionRecord,
    SessionState,
    StoredSession,
    ending_to_hash,
    figures_to_hash,
    pack_figures,
    placement_to_hash,
)
from outrider.session.record_calls import (
    Position,
    RecordCalls,
    Update,
    append,
    check_created,
    read_position,
    refusal,
)
from outrider.session.redis import ScriptCall, ScriptHead

# Refusals in a row after each of which Redis was asked.
MOST_REFUSALS = 3


class _Sent(NamedTuple):
    """A call that is under way: what it leads to, and the record that was meant.

    `held` is where it goes on from, if it is an update or an append.
    """

    becomes: Position | None
    record: SessionRecord
    held: Position | None = None


class Journal:
    """The record and the logs of one session that runs here.

    `token_ids` are prompt and completion, `logprobs` those of the completion if they are wanted,
    else empty. `figures` and `cached_tokens` are noted with the tokens. `on_lost` is called once
    when the session turns out to be another's, or (None) to have been cancelled elsewhere.
    """

    def __init__(
        self,
        calls: RecordCalls,
        record: SessionRecord,
        token_ids: Sequence[int],
        figures: SpeculationFigures | None = None,
    ) -> None:
        self.record = record
        self.token_ids = list(token_ids)
        self.logprobs: list[TokenLogprobs] = []
        self.figures = figures or SpeculationFigures()
        self.cached_tokens = 0
        # Why nothing more can be written: another coordinator has the session, or the id.
        self.lost: OutriderError | None = None
        # Somebody else has cancelled it; what was not in the log by then never will be.
        self.cancelled_elsewhere = False
        self.on_lost: Callable[[FencedError | None], None] | None = None
        self._calls = calls
        self._created = False
        # What Redis holds; None when that is not known.
        self._held: Position | None = None
        # The running record that was written last: while it is ours, only tokens can be new.
        self._written: SessionRecord | None = None
        # For appends under that record.
        self._head: ScriptHead | None = None
        # The highest epoch that Redis is known to have held for us.
        self._known_epoch = -1
        self._asked = False
        # Redis is to say whose the session is before anything else is done.
        self._unsure = False
        self._over = False
        self._sent: _Sent | None = None
        self._refusals = 0

    @classmethod
    def taken_over(cls, calls: RecordCalls, stored: StoredSession) -> "Journal":
        """That of a session as it was just read, and owned, or had finished."""
        record = stored.record
        journal = cls(calls, record, stored.token_ids, stored.figures)
        journal.logprobs = list(stored.logprobs)
        journal.cached_tokens = stored.cached_tokens
        journal._created = True
        journal._held = journal._wanted
        journal._known_epoch = record.epoch
        return journal

    @property
    def session_id(self) -> str:
        """The session's id."""
        return self.record.session_id

    @property
    def runs(self) -> bool:
        """Whether the session is here and running, so that its lease is renewed."""
        return self._created and self.record.state is SessionState.RUNNING and self._may_write

    @property
    def behind(self) -> bool:
        """Whether Redis holds something else than it should, and something can be done."""
        if not self._may_write:
            return False
        held = self._held
        if self._unsure or held is None or held.length != len(self.token_ids):
            return True
        return self._written is not self.record and held != self._wanted

    def extend(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> None:
        """Note committed tokens; `logprobs` has one entry for each if they are wanted."""
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)

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

    def finish(self, reason: FinishReason, error: OutriderError | None = None) -> None:
        """Note the end; the first one stays."""
        if self.record.state is SessionState.RUNNING:
            failure = Failure(error.reason, error.message) if error else None
            self.record = replace(
                self.record, state=SessionState.FINISHED, finish_reason=reason, failure=failure
            )

    def pause(self) -> None:
        """Note that nobody follows the session any more, unless it has ended."""
        if self.record.state is SessionState.RUNNING:
            self.record = replace(self.record, state=SessionState.PAUSED)

    def give_up(self) -> None:
        """Write nothing more: another journal of this coordinator has the session from now on."""
        self._over = True

    def ask(self) -> None:
        """Have Redis say whose the session is, whatever it said before; `unsure` until it has."""
        self._unsure = self._may_write

    @property
    def unsure(self) -> bool:
        """Whether Redis has yet to answer what `ask` asks."""
        return self._unsure and self._may_write

    def due(self, *, renew: bool = False) -> ScriptCall | None:
        """What is to be said to Redis next, to be followed by `answered` or `doubt`.

        None when there is nothing, or the last answer is not there yet. `renew` also has the lease
        renewed where nothing is behind.
        """
        if self._sent is not None or not (self.behind or (renew and self.runs)):
            return None
        if self._unsure and self._created:
            return self._ask()
        held = self._held
        if held is not None:
            if self._written is self.record and not renew:
                return self._append(held)
            return self._update(held, renew=renew)
        if not self._asked:
            if self._created:
                return self._ask()
            if self.record.state is not SessionState.RUNNING:
                self._over = True  # given up before anything was said
                return None
            self._asked = True
            return self._create()
        return self._create() if self._created else self._ask()

    def answered(self, reply: Any) -> None:
        """Take the reply to what was due."""
        sent, self._sent = self._sent, None
        assert sent is not None
        becomes, record, held = sent
        if becomes is None:
            self._found(read_position(reply))
        elif held is None:
            try:
                check_created(self.session_id, reply)
            except SessionExistsError as exists:
                self._refused(exists)
            else:
                self._hold(becomes, record)
        else:
            error = refusal(self.session_id, reply, held)
            if error is None:
                self._hold(becomes, record)
            else:
                self._refused(error)

    def doubt(self) -> None:
        """There is no reply: what was due may have been carried out, or may be yet."""
        self._sent = None
        self._held = self._written = None
        self._asked = not self._created

    @property
    def _may_write(self) -> bool:
        return self.lost is None and not self._over

    @property
    def _wanted(self) -> Position:
        record = self.record
        return Position(
            record.owner,
            record.epoch,
            len(self.token_ids),
            record.state,
            record.finish_reason,
            record.draft_worker_id,
        )

    def _create(self) -> ScriptCall:
        self._sent = _Sent(self._wanted, self.record)
        counts = figures_to_hash(self.figures, self.cached_tokens)
        return self._calls.create(self.record, self.token_ids, self.logprobs, counts)

    def _ask(self) -> ScriptCall:
        self._sent = _Sent(None, self.record)
        return self._calls.position(self.session_id)

    def _update(self, held: Position, *, renew: bool) -> ScriptCall:
        record = self.record
        more = len(self.token_ids) - held.length
        fields: Fields = {}
        if (held.owner, held.epoch) != (record.owner, record.epoch):
            fields |= {"owner": record.owner, "epoch": record.epoch, **placement_to_hash(record)}
        elif held.draft_worker_id != record.draft_worker_id:
            fields["draft_worker_id"] = record.draft_worker_id
        if held.finish_reason != record.finish_reason:
            fields |= ending_to_hash(record)
        if more:
            fields |= figures_to_hash(self.figures, self.cached_tokens)
        update = Update(
            owner=held.owner,
            epoch=held.epoch,
            state=record.state,
            base_len=held.length,
            token_ids=self.token_ids[held.length :],
            logprobs=self.logprobs[held.length - record.prompt_len :],
            fields=fields,
            # Tokens alone leave the times as they are: the lease has its own round.
            renew=renew or not more or held.state is not record.state,
        )
        self._sent = _Sent(self._wanted, record, held)
        return self._calls.update(self.session_id, update)

    def _append(self, held: Position) -> ScriptCall:
        """Tokens alone leave the times as they are: the lease has its own round."""
        if self._head is None:
            self._head = self._calls.appends(self.session_id, owner=held.owner, epoch=held.epoch)
        self._sent = _Sent(held.grown_to(len(self.token_ids)), self.record, held)
        logprobs = self.logprobs
        return append(
            self._head,
            held.length,
            self.token_ids[held.length :],
            logprobs[held.length - self.record.prompt_len :] if logprobs else (),
            pack_figures(self.figures, self.cached_tokens),
        )

    def _hold(self, held: Position, record: SessionRecord) -> None:
        self._held = held
        if self._written is not record:
            self._written = record if record.state is SessionState.RUNNING else None
            self._head = None
        self._known_epoch = max(self._known_epoch, held.epoch)
        self._created = True
        self._asked = False
        self._refusals = 0

    def _refused(self, error: OutriderError) -> None:
        if isinstance(error, SessionExistsError) and not self._created:
            self.lost = error  # the id was never ours
            return
        self._refusals += 1
        if self._refusals > MOST_REFUSALS:
            self._lose(FencedError(f"the record was lost: {error.message}"))
        # What was sent before a failure may have been carried out only now.
        self._held = self._written = None
        self._asked = False

    def _found(self, held: Position | None) -> None:
        """Judge what Redis holds, after it became doubtful."""
        self._asked = True
        self._unsure = False
        if held is None:
            # Redis came back empty, or the session never began and there is nothing to end.
            self._over = not self._created
            return
        record = self.record
        ours = held.owner == record.owner and held.epoch <= record.epoch
        # A Redis that was set back, as by a failover, has forgotten that we took the session.
        set_back = held.epoch < self._known_epoch
        if held.state is SessionState.FINISHED:
            if ours:
                self._over = True
            elif held.finish_reason is FinishReason.CANCELLED:
                self._over = self.cancelled_elsewhere = True
                self._tell_lost(None)
            else:
                self._lose_to(held)
        elif held.length > len(self.token_ids) or not (ours or set_back):
            self._lose_to(held)
        else:
            # What is still on its way and is carried out later finds another length or epoch.
            self._created = True
            self._held = held

    def _lose_to(self, held: Position) -> None:
        self._lose(
            FencedError(
                f"session {self.session_id} was taken over: it is at {held.length} tokens and "
                f"epoch {held.epoch} of coordinator {held.owner}"
            )
        )

    def _lose(self, error: FencedError) -> None:
        self.lost = error
        self._tell_lost(error)

    def _tell_lost(self, error: FencedError | None) -> None:
        if self.on_lost is not None:
            self.on_lost(error)
