"""What is said to Redis about a session, as script calls, and what the replies mean: no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from outrider.errors import FencedError, OutriderError, SessionExistsError, UnknownSessionError
from outrider.messages import FinishReason, TokenLogprobs
from outrider.session import record_scripts as scripts
from outrider.session.names import session_keys
from outrider.session.packing import TOKEN_BYTES, pack_logprobs, pack_tokens
from outrider.session.record import Fields, SessionRecord, SessionState, record_to_hash
from outrider.session.redis import Script, ScriptCall, ScriptHead, Value


class Position(NamedTuple):
    """How far a session has come in Redis; `length` counts the tokens of the log."""

    owner: str
    epoch: int
    length: int
    state: SessionState
    finish_reason: FinishReason | None = None
    draft_worker_id: str = ""

    def grown_to(self, length: int) -> "Position":
        """The same with a longer log."""
        return Position(
            self.owner, self.epoch, length, self.state, self.finish_reason, self.draft_worker_id
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A write to a session that its writer holds as `owner` under `epoch`.

    `token_ids` follow the `base_len` tokens of the log, `logprobs` has one entry for each of them
    or none at all, and `fields` are set. `renew` gives the session another time to live, and its
    lease too; a `state` other than running needs it.
    """

    owner: str
    epoch: int
    state: SessionState = SessionState.RUNNING
    base_len: int = 0
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    fields: Fields = field(default_factory=dict)
    renew: bool = True


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """How long what a session leaves in Redis lives after its last write, in seconds.

    A session whose owner has not renewed its `lease_s` is an orphan.
    """

    running_s: float = 86_400.0
    paused_s: float = 3_600.0
    finished_s: float = 3_600.0
    lease_s: float = 6.0

    def of(self, state: SessionState) -> int:
        """Milliseconds that a session in that state is kept."""
        seconds = {
            SessionState.RUNNING: self.running_s,
            SessionState.PAUSED: self.paused_s,
            SessionState.FINISHED: self.finished_s,
        }
        return int(seconds[state] * 1000)

    @property
    def lease_ms(self) -> int:
        """Milliseconds that a lease lasts."""
        return int(self.lease_s * 1000)


class RecordCalls:
    """Makes the calls; the replies are for `check_created`, `check_updated`, `read_position`."""

    def __init__(self, lifetimes: Lifetimes | None = None) -> None:
        self.lifetimes = lifetimes or Lifetimes()

    def create(
        self,
        record: SessionRecord,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] = (),
        more: Fields | None = None,
    ) -> ScriptCall:
        """Write a session whole, in whatever state it is; `more` fields beside its own."""
        lasts = self.lifetimes
        lease_ms = lasts.lease_ms if record.state is SessionState.RUNNING else 0
        head = (lasts.of(record.state), lease_ms, record.owner)
        logs = (pack_tokens(token_ids), pack_logprobs(logprobs))
        words = _words({**record_to_hash(record), **(more or {})})
        return _call(scripts.CREATE, record.session_id, *head, *logs, *words)

    def update(self, session_id: str, update: Update) -> ScriptCall:
        """Write to a session that is held."""
        lasts = self.lifetimes
        return _call(
            scripts.UPDATE,
            session_id,
            update.owner,
            update.epoch,
            update.state.value,
            lasts.of(update.state) if update.renew else 0,
            lasts.lease_ms,
            update.base_len,
            pack_tokens(update.token_ids),
            pack_logprobs(update.logprobs),
            *_words(update.fields),
        )

    def appends(self, session_id: str, *, owner: str, epoch: int) -> ScriptHead:
        """What all appends have in common while the session is held so; see `append`."""
        return ScriptHead(scripts.APPEND, session_keys(session_id)[:3], (owner, epoch), more=4)

    def position(self, session_id: str) -> ScriptCall:
        """Ask how far a session has come."""
        return _call(scripts.POSITION, session_id)

    def take_over(self, session_id: str, *, owner: str, tenant: str) -> ScriptCall:
        """Own a session that has not finished, and read all of it."""
        lasts = self.lifetimes
        running_ms = lasts.of(SessionState.RUNNING)
        return _call(scripts.TAKE_OVER, session_id, owner, tenant, running_ms, lasts.lease_ms)

    def cancel(self, session_id: str, *, tenant: str) -> ScriptCall:
        """Finish a session, whoever runs it."""
        return _call(scripts.CANCEL, session_id, tenant, self.lifetimes.of(SessionState.FINISHED))

    def pause_orphan(self, session_id: str) -> ScriptCall:
        """Pause a session that is running without a lease."""
        return _call(scripts.PAUSE_ORPHAN, session_id, self.lifetimes.of(SessionState.PAUSED))


def append(
    head: ScriptHead,
    base_len: int,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    figures: str,
) -> ScriptCall:
    """Add tokens to the log of a session that is held, and change nothing else but figures.

    `figures` comes of `pack_figures`.
    """
    return head.call(
        b"%d" % (base_len * TOKEN_BYTES),
        pack_tokens(token_ids),
        figures.encode(),
        pack_logprobs(logprobs) if logprobs else b"",
    )


def check_created(session_id: str, reply: Any) -> None:
    """Raise `SessionExistsError` unless the session was written."""
    if reply[0] != b"ok":
        raise SessionExistsError(f"session {session_id!r} exists already; choose another id")


def check_updated(session_id: str, reply: Any, update: Update) -> None:
    """Raise `UnknownSessionError` or `FencedError` unless the update was carried out."""
    held = Position(update.owner, update.epoch, update.base_len, update.state)
    error = refusal(session_id, reply, held)
    if error is not None:
        raise error


def refusal(session_id: str, reply: Any, held: Position) -> OutriderError | None:
    """Why an update or an append to a session as `held` was not carried out; None if it was."""
    if reply == 1:
        return None
    verdict, found = (word.decode() for word in reply)
    match verdict:
        case "unknown":
            return unknown_session(session_id)
        case "epoch":
            said = f"session {session_id} is at epoch {found}, not {held.epoch}"
        case "owner":
            said = f"session {session_id} is run by coordinator {found}, not {held.owner}"
        case "base_len":
            said = (
                f"the log of session {session_id} has {found} tokens; "
                f"an append at base_len {held.length} does not continue it"
            )
        case _:
            said = f"session {session_id} is {found}; nothing more may be written"
    return FencedError(said)


def read_position(reply: Any) -> Position | None:
    """The position of a session; None when there is no such session."""
    if not reply:
        return None
    owner, epoch, state, finish, draft_worker_id, length = reply
    return Position(
        owner.decode(),
        int(epoch),
        int(length),
        SessionState(state.decode()),
        FinishReason(finish.decode()) if finish else None,
        draft_worker_id.decode(),
    )


def unknown_session(session_id: str) -> UnknownSessionError:
    """There is no such session."""
    return UnknownSessionError(f"there is no session {session_id!r}, or it has expired")


def _call(script: Script, session_id: str, *args: Value) -> ScriptCall:
    return ScriptCall(script, session_keys(session_id), args)


def _words(fields: Fields) -> list[Value]:
    return [word for pair in fields.items() for word in pair]
