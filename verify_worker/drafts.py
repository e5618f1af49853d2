"""The scheduler's side of drafting: what was asked for, what came, and what is dropped.

A proposal is a hint from an untrusted peer: one that is stale, malformed or unknown is
dropped and counted, and nothing else happens to the session.
"""

import math
from collections import defaultdict
from collections.abc import Sequence

from outrider.errors import InvalidRequestError, OutriderError, OverloadedError, UnavailableError
from outrider.messages import (
    AssignDrafter,
    CloseDraft,
    Draft,
    DrafterLost,
    DraftFailed,
    DraftWorkerRef,
    OpenDraft,
    Proposal,
    Tensor,
)
from verify_worker import draft_length, policy
from verify_worker.cost import StepShape
from verify_worker.draft_figures import DraftWorker, levels_of
from verify_worker.malformed import DraftShape, fault_of
from verify_worker.state import (
    Counters,
    Decided,
    Late,
    LeaveDrafter,
    Output,
    Session,
    ToCoordinator,
    ToDrafter,
    Want,
)
from verify_worker.waiting import Awaited, due_s

# Malformed proposals after which a draft worker is left alone.
MALFORMED_TO_QUARANTINE = 3
# Times that a session is opened again at a draft worker that has lost it.
MAX_REOPENINGS = 3


class Drafts:
    """Proposals and draft workers of the sessions that the scheduler holds."""

    def __init__(
        self,
        sessions: dict[str, Session],
        counters: Counters,
        shape: DraftShape,
        q_top: int,
        corpus: str = "",
        layers: int = 0,
    ) -> None:
        """`layers` of the target; its number stands for what the head is given. 0: unknown."""
        self._q_top = q_top
        self._layers = layers
        self._corpus = corpus
        self._sessions = sessions
        self._counters = counters
        self._shape = shape
        self._malformed: dict[str, int] = {}
        self.workers: defaultdict[str, DraftWorker] = defaultdict(DraftWorker)

    def reads_hidden(self, session: Session) -> bool:
        """Whether its draft worker wants the hidden states of what is committed."""
        drafter = session.drafter
        worker = None if drafter is None else self.workers.get(drafter.worker_id)
        return worker is not None and worker.reads_hidden

    def features(self, decided: Decided) -> tuple[tuple[int, Tensor], ...]:
        """The hidden states of a verdict as a commit has them, where they were wanted."""
        return () if decided.hidden is None else ((self._layers, decided.hidden),)

    def open(self, session: Session) -> list[Output]:
        """Begin, or begin again, at the session's draft worker."""
        _ask_nothing(session)
        session.late = None
        if session.drafter is None:
            return []
        command = OpenDraft(
            session_id=session.session_id,
            epoch=session.epoch,
            token_ids=tuple(session.tokens),
            sampling=session.sampling,
            prompt_len=session.prompt_len,
            stop_ids=session.endings.stop_ids,
            rule=session.rule,
            q_top=self._q_top,
            max_nodes=self._shape.max_nodes,
            traceparent=session.traceparent,
            corpus=_corpus_of(self._corpus, session.tenant),
        )
        return [ToDrafter(session.drafter, command)]

    def assign(self, command: AssignDrafter) -> list[Output]:
        """Move a session to another draft worker, or to none."""
        session = self._sessions.get(command.session_id)
        if session is None or session.epoch != command.epoch or not session.speculation.enabled:
            return []
        outputs: list[Output] = []
        if session.drafter is not None:
            close = CloseDraft(session_id=session.session_id, epoch=session.epoch)
            outputs.append(ToDrafter(session.drafter, close))
        session.drafter = session.may_use(command.drafter)
        session.patience = policy.Patience()
        session.record = draft_length.Record()
        session.resume_at_len = session.look_at_len = session.reopened = 0
        return outputs + self.open(session)

    def ask(
        self,
        session: Session,
        stakes: policy.Stakes,
        draft_lens: tuple[int, int],
        now_s: float,
        fixed_wait_s: float,
    ) -> int:
        """Decide how far to draft and how long to wait for it; the tokens to ask for.

        `draft_lens` are the fewest and the most. Where no wait pays, one proposal is asked for
        now and then without waiting: it comes too late, and shows whether it would have paid.
        `fixed_wait_s` above 0 is waited whatever was measured.
        """
        _ask_nothing(session)
        session.ready_at_s, session.asked_len = now_s, 0
        length = len(session.tokens)
        most = draft_lens[1]
        if session.drafter is None or not most or length < session.resume_at_len:
            return 0
        worker = self.workers[session.drafter.worker_id]
        _fade(session)
        others = self._asking(session.drafter)
        choice = worker.choose(session.record, stakes, draft_lens, others)
        wait_s = worker.wait_s(choice, others)
        if choice.draft_len and fixed_wait_s:
            wait_s = fixed_wait_s
        if not wait_s and length < session.look_at_len:
            return 0
        tokens = choice.draft_len or min(policy.LOOK_TOKENS, most)
        if not worker.punctuality.may_ask(now_s, tokens * stakes.plain_s):
            return 0
        if not wait_s:
            session.look_at_len = length + session.patience.pause()
        session.want = Want(length, tokens, now_s + wait_s)
        session.asked_at_s, session.asked_len = now_s, tokens
        return tokens

    def _asking(self, drafter: DraftWorkerRef) -> list[int]:
        """How far the sessions draft that ask this draft worker, or just did."""
        sessions = self._sessions.values()
        return [one.asked_len for one in sessions if one.asked_len and one.drafter == drafter]

    def awaited(self, waits: Sequence[Session], now_s: float) -> list[Awaited]:
        """Those of the waiting sessions whose proposals can be expected, and when."""
        found: list[Awaited] = []
        for session in waits:
            want, asked_at_s = session.want, session.asked_at_s
            if want is None or asked_at_s is None or session.drafter is None:
                continue
            worker = self.workers[session.drafter.worker_id]
            seconds = worker.latency.at(
                max(self._asking(session.drafter), default=0), worker.token_s
            )
            wait_s = want.wait_until_s - asked_at_s
            due = due_s(seconds, now_s - asked_at_s, wait_s)
            usual = due_s(seconds, 0.0, wait_s)
            if due is not None and usual is not None:
                shape = StepShape.of(1 + want.draft_len, len(session.tokens) + want.draft_len)
                found.append(Awaited(asked_at_s + due, usual, shape))
        return found

    def note_step(
        self,
        session: Session,
        began_s: float,
        *,
        draft: Draft,
        accepted: int,
        stakes: policy.Stakes,
        fixed_wait_s: float,
    ) -> None:
        """The session takes a step, with a draft or without the one that it wanted.

        `accepted` tokens came out of the `draft` that was verified. A `fixed_wait_s` above 0 is
        what a session may wait, however little there is to win.
        """
        if session.asked_at_s is None:
            return
        waited_s = max(began_s - session.asked_at_s, 0.0)
        want = session.want
        rows = len(draft.token_ids)
        if want is not None and session.drafter is not None:
            self._counters.missed_proposals += 1
            worker = self.workers[session.drafter.worker_id]
            worker.punctuality.note_missed(session.asked_at_s, began_s)
            longest = max(self._asking(session.drafter), default=0)
            sample = worker.latency.note(math.inf, longest)
            session.late = Late(want.base_len, want.draft_len, session.asked_at_s, sample)
        else:
            # One that was cut for want of rows or blocks says nothing about what is beyond.
            whole = session.draft is None or len(session.draft.token_ids) == rows
            self._record(session, session.asked_len if whole else levels_of(draft), draft, accepted)
        if want is None or want.wait_until_s > session.asked_at_s:
            saved_s = stakes.saved_s(accepted, rows) if want is None else 0.0
            longest_wait_s = fixed_wait_s or session.asked_len * stakes.plain_s
            pause = session.patience.note(waited_s, saved_s, longest_wait_s)
            session.resume_at_len = len(session.tokens) + pause if pause else 0
        _ask_nothing(session)

    def note_committed(self, session: Session) -> None:
        """See what a draft that came too late would have been worth, once that can be seen."""
        late = session.late
        if late is None or not late.token_ids:
            return
        said = session.tokens[late.base_len : late.base_len + len(late.token_ids)]
        right = 0
        while right < len(said) and said[right] == late.token_ids[right]:
            right += 1
        if right < len(said) or right == len(late.token_ids):
            self._record(session, late.draft_len, Draft(late.token_ids), right)
            session.late = None

    def _record(self, session: Session, asked: int, draft: Draft, accepted: int) -> None:
        """Count what came of a draft, for the session and for its draft worker."""
        if not asked:
            return
        levels, rows = levels_of(draft), len(draft.token_ids)
        _fade(session)
        session.record.note(asked=asked, levels=levels, rows=rows, accepted=accepted)
        if session.drafter is not None:
            record = self.workers[session.drafter.worker_id].record
            record.fade(0.5 ** (1 / draft_length.DRAFTER_HALF_LIFE_DRAFTS))
            record.note(asked=asked, levels=levels, rows=rows, accepted=accepted)

    def _note_late(self, session: Session, proposal: Proposal, now_s: float) -> None:
        """A proposal that was missed has come: remember how long it took and what it says."""
        late = session.late
        if late is None or session.drafter is None or proposal.base_len != late.base_len:
            return
        worker = self.workers[session.drafter.worker_id]
        worker.latency.correct(late.sample, now_s - late.asked_at_s)
        worker.note_answer()
        worker.note_cost(proposal, now_s - late.asked_at_s, late.sample.draft_len)
        if not proposal.draft.token_ids:
            self._record(session, late.draft_len, proposal.draft, 0)
        if not proposal.draft.token_ids or not proposal.draft.is_chain:
            session.late = None
            return
        late.token_ids = proposal.draft.token_ids[: late.draft_len]
        self.note_committed(session)

    def receive(self, worker_id: str, proposal: Proposal, now_s: float) -> list[Output]:
        """Keep a proposal that fits, drop any other; it came at `now_s`."""
        session = self._sessions.get(proposal.session_id)
        if (
            session is None
            or session.drafter is None
            or session.drafter.worker_id != worker_id
            or proposal.epoch != session.epoch
        ):
            self._counters.stale_proposals += 1
            return []
        if self._layers:
            self.workers[worker_id].reads_hidden = self._layers in proposal.feature_layers
        want = session.want
        if want is None or proposal.base_len != want.base_len:
            self._counters.stale_proposals += 1
            self._note_late(session, proposal, now_s)
            return []
        # Whatever it is, nothing better will come: no more waiting.
        session.want = None
        session.ready_at_s = now_s
        worker = self.workers[worker_id]
        if session.asked_at_s is not None:
            seconds = now_s - session.asked_at_s
            longest = max(self._asking(session.drafter), default=0)
            worker.latency.note(seconds, longest)
            worker.note_cost(proposal, seconds, longest)
        worker.note_answer()
        fault = fault_of(proposal.draft, want.draft_len, session.rule, self._shape)
        if fault:
            return self.malformed(worker_id, fault)
        session.reopened = 0
        # An empty draft says that the drafter has nothing: a plain step at once.
        session.draft = proposal.draft if proposal.draft.token_ids else None
        return []

    def malformed(self, worker_id: str, fault: str) -> list[Output]:
        """Count rubbish of a draft worker and leave the worker when it goes on."""
        self._counters.malformed_proposals += 1
        self._malformed[worker_id] = self._malformed.get(worker_id, 0) + 1
        if self._malformed[worker_id] < MALFORMED_TO_QUARANTINE:
            return []
        # Should the coordinator send sessions there again, one more is enough.
        self._malformed[worker_id] = MALFORMED_TO_QUARANTINE - 1
        error = InvalidRequestError(f"draft worker {worker_id} sent malformed drafts: {fault}")
        # The end of the stream closes its sessions over there too.
        return [*self.lose(worker_id, error), LeaveDrafter(worker_id)]

    def failed(self, worker_id: str, failure: DraftFailed) -> list[Output]:
        """A draft worker can't draft for one session: begin again there, or do without."""
        session = self._sessions.get(failure.session_id)
        if (
            session is None
            or session.epoch != failure.epoch
            or session.drafter is None
            or session.drafter.worker_id != worker_id
        ):
            return []
        session.reopened += 1
        if isinstance(failure.error, OverloadedError) or session.reopened > MAX_REOPENINGS:
            error = failure.error
            if isinstance(error, InvalidRequestError):
                # To the coordinator that would mean malformed drafts.
                error = UnavailableError(f"draft worker {worker_id} refuses it: {error.message}")
            return [self._drop(session, session.drafter, error)]
        return self.open(session)

    def lose(self, worker_id: str, error: OutriderError | None = None) -> list[Output]:
        """A draft worker is gone: its sessions go on plainly and would take another."""
        reason = error or UnavailableError(f"draft worker {worker_id} is gone")
        self.workers.pop(worker_id, None)
        return [
            self._drop(session, session.drafter, reason)
            for session in self._sessions.values()
            if session.drafter is not None and session.drafter.worker_id == worker_id
        ]

    def _drop(self, session: Session, drafter: DraftWorkerRef, error: OutriderError) -> Output:
        session.drafter = session.late = None
        session.draft = None
        session.want = None
        lost = DrafterLost(
            session_id=session.session_id,
            epoch=session.epoch,
            worker_id=drafter.worker_id,
            error=error,
        )
        return ToCoordinator(session.owner, lost)


def _corpus_of(model: str, tenant: str) -> str:
    """Names the outputs of one tenant at one model; empty where the model has no name.

    No tenant's name has a slash, so that no two pairs make one word.
    """
    return f"{model}/{tenant}" if model else ""


def _ask_nothing(session: Session) -> None:
    session.draft = session.want = session.asked_at_s = None


def _fade(session: Session) -> None:
    """Let what is known of the session's drafts fade with the tokens committed since."""
    tokens = len(session.tokens) - session.recorded_len
    if tokens > 0 and session.record.drafts:
        session.record.fade(0.5 ** (tokens / draft_length.SESSION_HALF_LIFE_TOKENS))
    session.recorded_len = len(session.tokens)
