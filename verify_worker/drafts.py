"""The scheduler's side of drafting: what was asked for, what came, and what is dropped.

A proposal is a hint from an untrusted peer: one that is stale, malformed or unknown is
dropped and counted, and nothing else happens to the session.
"""

from collections import defaultdict

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
    SparseDistribution,
)
from verify_worker import policy
from verify_worker.state import (
    Counters,
    LeaveDrafter,
    Output,
    Session,
    ToCoordinator,
    ToDrafter,
    Want,
)

# Malformed proposals after which a draft worker is left alone.
MALFORMED_TO_QUARANTINE = 3
# Times that a session is opened again at a draft worker that has lost it.
MAX_REOPENINGS = 3


class Drafts:
    """Proposals and draft workers of the sessions that the scheduler holds."""

    def __init__(
        self, sessions: dict[str, Session], counters: Counters, vocab_size: int, q_top: int
    ) -> None:
        self._q_top = q_top
        self._sessions = sessions
        self._counters = counters
        self._vocab_size = vocab_size
        self._malformed: dict[str, int] = {}
        self._punctuality: defaultdict[str, policy.Punctuality] = defaultdict(policy.Punctuality)

    def open(self, session: Session) -> list[Output]:
        """Begin, or begin again, at the session's draft worker."""
        self.want(session, 0, 0.0, 0.0)
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
            traceparent=session.traceparent,
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
        session.resume_at_len = session.reopened = 0
        return outputs + self.open(session)

    def may_ask(self, drafter: DraftWorkerRef, now_s: float, wait_s: float) -> bool:
        """Whether the draft worker is worth such a wait now; True is a promise to ask."""
        return self._punctuality[drafter.worker_id].may_ask(now_s, wait_s)

    def want(self, session: Session, draft_len: int, now_s: float, wait_s: float) -> None:
        """Note that `draft_len` tokens were asked for; 0 asks for nothing."""
        session.draft = session.want = session.asked_at_s = None
        if draft_len:
            session.want = Want(len(session.tokens), draft_len, now_s + wait_s)
            session.asked_at_s = now_s

    def note_step(
        self, session: Session, began_s: float, *, saved_s: float, longest_wait_s: float
    ) -> None:
        """The session takes a step, with a draft or without the one that it wanted.

        `saved_s` is what the accepted tokens would have cost plainly.
        """
        if session.asked_at_s is not None:
            if session.want is not None and session.drafter is not None:
                self._counters.missed_proposals += 1
                punctuality = self._punctuality[session.drafter.worker_id]
                punctuality.note_missed(session.asked_at_s, began_s)
            waited_s = max(began_s - session.asked_at_s, 0.0)
            pause = session.patience.note(waited_s, saved_s, longest_wait_s)
            session.resume_at_len = len(session.tokens) + pause if pause else 0
        self.want(session, 0, 0.0, 0.0)

    def receive(self, worker_id: str, proposal: Proposal) -> list[Output]:
        """Keep a proposal that fits, drop any other."""
        session = self._sessions.get(proposal.session_id)
        want = session.want if session is not None else None
        if (
            session is None
            or want is None
            or session.drafter is None
            or session.drafter.worker_id != worker_id
            or proposal.epoch != session.epoch
            or proposal.base_len != want.base_len
        ):
            self._counters.stale_proposals += 1
            return []
        # Whatever it is, nothing better will come: no more waiting.
        session.want = None
        self._punctuality[worker_id].note_in_time()
        fault = self._fault(proposal.draft, want)
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
        self._punctuality.pop(worker_id, None)
        return [
            self._drop(session, session.drafter, reason)
            for session in self._sessions.values()
            if session.drafter is not None and session.drafter.worker_id == worker_id
        ]

    def _drop(self, session: Session, drafter: DraftWorkerRef, error: OutriderError) -> Output:
        session.drafter = None
        session.draft = None
        session.want = None
        lost = DrafterLost(
            session_id=session.session_id,
            epoch=session.epoch,
            worker_id=drafter.worker_id,
            error=error,
        )
        return ToCoordinator(session.owner, lost)

    def _fault(self, draft: Draft, want: Want) -> str:
        """What is wrong with a draft; empty when nothing is."""
        if len(draft.token_ids) > want.draft_len:
            return f"{len(draft.token_ids)} tokens where {want.draft_len} were asked for"
        strange = [t for t in draft.token_ids if not 0 <= t < self._vocab_size]
        if strange:
            return f"token id {strange[0]} outside the vocabulary of {self._vocab_size}"
        if not draft.is_chain:
            return "a tree, which this worker does not verify"
        return next(filter(None, map(self._fault_of_q, draft.token_ids, draft.q)), "")

    def _fault_of_q(self, token: int, q: SparseDistribution) -> str:
        """What is wrong with the distribution that a token was sampled from."""
        if len(set(q.token_ids)) != len(q.token_ids):
            return "a distribution that names a token twice"
        if any(not 0 <= other < self._vocab_size for other in q.token_ids):
            return f"a distribution with an id outside the vocabulary of {self._vocab_size}"
        if dict(zip(q.token_ids, q.weights, strict=True)).get(token, 0) <= 0:
            return f"token {token}, which its own distribution can't give"
        return ""
