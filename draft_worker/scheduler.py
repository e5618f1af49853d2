"""Which sessions want a proposal, and the events that answer them. No thread, no gRPC.

A session belongs to the stream that opened it, so two verify workers may use one id. It has
at most one want: the latest. What is wanted when a newer command arrives is superseded; its
proposal would be stale. Nothing here raises: whatever goes wrong with a session becomes a
`DraftFailed` of that session alone.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from opentelemetry.trace import Span

from draft_worker.figures import Figures
from draft_worker.malformed import FeatureShape, fault_of
from outrider import logs, telemetry
from outrider.drafting.base import Drafter, DraftLaw, DraftRequest
from outrider.errors import (
    FencedError,
    InternalError,
    OutriderError,
    OverloadedError,
    UnknownSessionError,
)
from outrider.messages import (
    FREE,
    CloseDraft,
    CommitDraft,
    Draft,
    DraftCommand,
    DraftEvent,
    DraftFailed,
    OpenDraft,
    Price,
    Proposal,
    Timings,
)

# More than any verify worker asks for in earnest.
MAX_DRAFT_LEN = 64

Key = tuple[int, str]
Addressed = tuple[int, DraftEvent]


@dataclass(slots=True)
class _Session:
    epoch: int
    base_len: int
    span: Span
    drafts: int = 0
    draft_tokens: int = 0
    superseded: int = 0


@dataclass(frozen=True, slots=True)
class _Want:
    """`draft_len` 0 prepares the session and is answered with silence."""

    draft_len: int
    since: float
    price: Price = FREE
    # Seconds that the drafter has worked for it in passes that did not finish it.
    worked_s: float = 0.0


class Scheduler:
    """The sessions of all streams, over one drafter.

    `apply` takes a command in, `answer` lets the drafter work once for everything wanted.
    Both return events with the stream that each is for.
    """

    def __init__(
        self,
        drafter: Drafter,
        figures: Figures,
        *,
        max_sessions: int,
    ) -> None:
        self._drafter = drafter
        self._reads = reads = drafter.reads
        self._feature_shape = (
            None if reads is None else FeatureShape(frozenset({reads.layer}), reads.size)
        )
        self._figures = figures
        self._max_sessions = max_sessions
        self._sessions: dict[Key, _Session] = {}
        # In the order in which sessions began to want something: the oldest goes first.
        self._wants: dict[Key, _Want] = {}
        self._refusing = False
        self._log = logs.get(__name__)
        self._tracer = telemetry.tracer(__name__)

    @property
    def _feature_layers(self) -> tuple[int, ...]:
        return () if self._reads is None else (self._reads.layer,)

    @property
    def has_wants(self) -> bool:
        """Whether `answer` has something to do."""
        return bool(self._wants)

    @property
    def is_drained(self) -> bool:
        """Whether nothing is opened and no session is left."""
        return self._refusing and not self._sessions

    def refuse(self, refuse: bool) -> None:
        """Open nothing from now on, or something again; running sessions go on."""
        self._refusing = refuse

    def apply(self, stream: int, command: DraftCommand) -> list[Addressed]:
        """Take one command in."""
        key = (stream, command.session_id)
        try:
            match command:
                case OpenDraft():
                    self._open(key, command)
                case CommitDraft():
                    self._commit(key, self._without_malformed(command))
                case CloseDraft():
                    self._check_epoch(key, command.epoch)
                    self._end(key)
        except OutriderError as error:
            return [_failed(key, command.epoch, error)]
        except Exception as fault:
            return [self._poisoned(key, command.epoch, fault)]
        return []

    def close_stream(self, stream: int) -> None:
        """End every session that the stream opened."""
        for key in [key for key in self._sessions if key[0] == stream]:
            self._end(key)

    def answer(self) -> list[Addressed]:
        """Ask the drafter once for all that is wanted; what is not ready stays wanted."""
        wants = dict(self._wants)
        begin = time.monotonic()
        try:
            drafts = self._propose(wants)
        except Exception:
            if len(wants) == 1:
                return self._answer_alone(wants)
            # One of them is poisonous; alone, each shows whether it is the one.
            self._log.warning("a batch failed; asking session by session", sessions=len(wants))
            return self._answer_alone(wants)
        return self._settle(wants, drafts, begin)

    # --- commands -----------------------------------------------------------------------

    def _open(self, key: Key, command: OpenDraft) -> None:
        self._check_epoch(key, command.epoch)
        if self._refusing:
            raise OverloadedError("this draft worker is draining; use another one")
        if key not in self._sessions and len(self._sessions) >= self._max_sessions:
            raise OverloadedError(
                f"this draft worker holds {self._max_sessions} sessions, as many as it may; "
                "use another one or raise --max-sessions"
            )
        self._end(key)
        law = DraftLaw(
            command.prompt_len,
            command.stop_ids,
            command.rule,
            command.q_top,
            command.max_nodes,
            command.corpus,
        )
        self._drafter.open(_drafter_id(key), command.token_ids, command.sampling, law)
        self._sessions[key] = _Session(
            command.epoch, len(command.token_ids), self._begin_span(command)
        )
        self._figures.sessions = len(self._sessions)
        self._wants[key] = _Want(min(command.draft_len, MAX_DRAFT_LEN), time.monotonic())

    def _commit(self, key: Key, command: CommitDraft) -> None:
        self._check_epoch(key, command.epoch)
        session = self._sessions.get(key)
        if session is None or session.epoch != command.epoch:
            raise UnknownSessionError(
                f"session {command.session_id!r} is not open here at epoch {command.epoch}; "
                "open it again from its tokens"
            )
        reads, tokens = self._reads, len(command.token_ids)
        features = dict(command.features or ())
        hidden = features.get(reads.layer) if reads is not None and tokens else None
        self._drafter.commit(_drafter_id(key), command.base_len, command.token_ids, hidden)
        if reads is not None:
            self._figures.commits(tokens, tokens if hidden is not None else 0)
        session.base_len += len(command.token_ids)
        previous = self._wants.get(key)
        if previous is not None and previous.draft_len:
            session.superseded += 1
            self._figures.superseded += 1
        if command.draft_len:
            # An older want keeps its place in the order.
            draft_len = min(command.draft_len, MAX_DRAFT_LEN)
            self._wants[key] = _Want(draft_len, time.monotonic(), command.price)
        else:
            self._wants.pop(key, None)

    def _without_malformed(self, command: CommitDraft) -> CommitDraft:
        """The commit, without its features if something is wrong with them."""
        fault = fault_of(command, self._feature_shape)
        if not fault:
            return command
        self._figures.malformed_features += 1
        self._log.debug("malformed features", session_id=command.session_id, fault=fault)
        return replace(command, features=())

    def _check_epoch(self, key: Key, epoch: int) -> None:
        session = self._sessions.get(key)
        if session is not None and epoch < session.epoch:
            raise FencedError(f"epoch {epoch} is over; the session is at {session.epoch}")

    def _end(self, key: Key) -> None:
        """Forget the session, if there is one."""
        session = self._sessions.pop(key, None)
        self._wants.pop(key, None)
        if session is None:
            return
        self._figures.sessions = len(self._sessions)
        session.span.set_attributes(
            {
                "outrider.drafts": session.drafts,
                "outrider.draft_tokens": session.draft_tokens,
                "outrider.superseded": session.superseded,
                "outrider.base_len": session.base_len,
            }
        )
        session.span.end()
        try:
            self._drafter.close(_drafter_id(key))
        except Exception:
            self._log.exception("the drafter could not close a session", session_id=key[1])

    def _begin_span(self, command: OpenDraft) -> Span:
        return self._tracer.start_span(
            "draft.session",
            context=telemetry.context_of(command.traceparent),
            attributes={
                "outrider.session_id": command.session_id,
                "outrider.epoch": command.epoch,
                "outrider.drafter": self._drafter.name,
            },
        )

    # --- proposals ----------------------------------------------------------------------

    def _propose(self, wants: dict[Key, _Want]) -> list[Draft | None]:
        requests = [
            DraftRequest(_drafter_id(key), want.draft_len, want.price)
            for key, want in wants.items()
        ]
        return self._drafter.propose(requests)

    def _answer_alone(self, wants: dict[Key, _Want]) -> list[Addressed]:
        events: list[Addressed] = []
        for key, want in wants.items():
            begin = time.monotonic()
            try:
                drafts = self._propose({key: want})
            except Exception as fault:
                events.append(self._poisoned(key, self._sessions[key].epoch, fault))
                continue
            events += self._settle({key: want}, drafts, begin)
        return events

    def _settle(
        self, wants: dict[Key, _Want], drafts: Iterable[Draft | None], begin: float
    ) -> list[Addressed]:
        """The proposals of those that are ready."""
        seconds = time.monotonic() - begin
        self._figures.batch(len(wants), seconds)
        events: list[Addressed] = []
        for (key, want), draft in zip(wants.items(), drafts, strict=True):
            if draft is None:
                self._wants[key] = replace(want, worked_s=want.worked_s + seconds)
                continue
            del self._wants[key]
            if not want.draft_len:
                continue
            session = self._sessions[key]
            session.drafts += 1
            session.draft_tokens += len(draft.token_ids)
            self._figures.drafts += 1
            self._figures.draft_tokens += len(draft.token_ids)
            proposal = Proposal(
                session_id=key[1],
                epoch=session.epoch,
                base_len=session.base_len,
                draft=draft,
                timings=Timings(
                    queue_us=int((begin - want.since) * 1e6),
                    compute_us=int(seconds * 1e6),
                    batch_sessions=len(wants),
                ),
                draft_us=int((want.worked_s + seconds) * 1e6),
                feature_layers=self._feature_layers,
            )
            events.append((key[0], proposal))
        return events

    def _poisoned(self, key: Key, epoch: int, fault: Exception) -> Addressed:
        """End the session that made the drafter raise."""
        self._end(key)
        self._figures.failed += 1
        if isinstance(fault, OutriderError):
            return _failed(key, epoch, fault)
        self._log.error("the drafter failed", session_id=key[1], exc_info=fault)
        return _failed(key, epoch, InternalError(f"the drafter failed: {fault!r}"))


def _drafter_id(key: Key) -> str:
    """The session's name in the drafter, unique over streams."""
    return f"{key[0]}/{key[1]}"


def _failed(key: Key, epoch: int, error: OutriderError) -> Addressed:
    return key[0], DraftFailed(session_id=key[1], epoch=epoch, error=error)
