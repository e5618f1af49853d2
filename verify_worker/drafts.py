"""The scheduler's side of drafting: what was asked for, what came, and what is dropped.

A proposal is a hint from an untrusted peer: one that is stale, malformed or unknown is
dropped and counted, and nothing else happens to the session.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from outrider.drafting.hits import compared
from outrider.errors import InvalidRequestError, OutriderError, OverloadedError, UnavailableError
from outrider.messages import (
    FREE,
    AssignDrafter,
    Draft,
    DrafterLost,
    DraftFailed,
    DraftWorkerRef,
    Proposal,
)
from verify_worker import draft_length, policy
from verify_worker.draft_commands import DraftCommands
from verify_worker.draft_demand import DraftDemand
from verify_worker.draft_figures import DraftWorker, levels_of
from verify_worker.malformed import DraftShape, fault_of
from verify_worker.state import (
    Counters,
    Late,
    LeaveDrafter,
    Output,
    Session,
    ToCoordinator,
    Want,
)
from verify_worker.waiting import Awaited, who_wait

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
        self.commands = DraftCommands(shape, q_top, layers, corpus)
        self._sessions = sessions
        self._counters = counters
        self._shape = shape
        self._malformed: dict[str, int] = {}
        self.workers: defaultdict[str, DraftWorker] = defaultdict(DraftWorker)
        self.demand = DraftDemand()

    def reads_hidden(self, session: Session, now_s: float) -> bool:
        """Whether its draft worker wants the hidden states of what is committed next.

        One that is asked for nothing does without.
        """
        drafter = session.drafter
        worker = None if drafter is None else self.workers.get(drafter.worker_id)
        return worker is not None and worker.reads_hidden and self._may_ask(session, now_s)

    def open(self, session: Session) -> list[Output]:
        """Begin, or begin again, at the session's draft worker."""
        session.ask_nothing()
        session.late = None
        return self.commands.open(session)

    def begin(
        self, session: Session, stakes: policy.Stakes, draft_lens: tuple[int, int]
    ) -> list[Output]:
        """Open a new session at its draft worker, unless drafts would not pay as things stand."""
        if session.drafter is None:
            return []
        worker = self.workers[session.drafter.worker_id]
        if stakes.sessions > 1 and worker.latency.seconds and not draft_lens[0]:
            others = self._asking(session.drafter)
            if not worker.choose(session.record, stakes, draft_lens, others).draft_len:
                return []
        return self.open(session)

    def assign(self, command: AssignDrafter) -> list[Output]:
        """Move a session to another draft worker, or to none."""
        session = self._sessions.get(command.session_id)
        if session is None or session.epoch != command.epoch or not session.speculation.enabled:
            return []
        outputs: list[Output] = []
        if session.drafter is not None:
            outputs += self.commands.close(session)
        session.drafter = session.may_use(command.drafter)
        session.patience = policy.Patience()
        session.record = draft_length.Record()
        session.resume_at_len = session.look_at_len = session.choose_at_len = 0
        session.reopened = 0
        return outputs + self.open(session)

    def choose(
        self, lens: Mapping[str, tuple[int, int]], stakes: policy.Stakes, now_s: float
    ) -> None:
        """Choose how far the sessions of the step that has ended draft next, before any asks.

        `lens` has the fewest and the most tokens that each may ask for. All wait for those who
        draft, so what these win has to pay for it, together with those who draft in other steps.
        """
        for name, draft_lens in lens.items():
            session = self._sessions[name]
            session.choice = self._choose(session, stakes, draft_lens, now_s)
            session.shares = bool(draft_lens[0])
        offers = {
            name: session.choice
            for name, session in self._sessions.items()
            if session.choice is not None and (name in lens or session.shares)
        }
        if not any(least for least, _ in lens.values()):
            for name in lens.keys() & who_wait(offers, stakes.sessions, stakes.delay_s):
                self._sessions[name].shares = True

    def _choose(
        self, session: Session, stakes: policy.Stakes, draft_lens: tuple[int, int], now_s: float
    ) -> draft_length.Choice | None:
        """How far a session drafts; None when it is not to ask at all."""
        self.demand.consider(session.appetite, session.record, stakes, draft_lens, now_s)
        length = len(session.tokens)
        if session.drafter is None or not draft_lens[1] or length < session.resume_at_len:
            return None
        if not draft_lens[0] and not self._may_ask(session, now_s):
            return None
        session.fade_record()
        session.choose_at_len = length + policy.UNWILLING_TOKENS
        worker = self.workers[session.drafter.worker_id]
        others = self._asking(session.drafter, session)
        return worker.choose(session.record, stakes, draft_lens, others, session.heeds_price)

    def ask(
        self,
        session: Session,
        stakes: policy.Stakes,
        draft_lens: tuple[int, int],
        now_s: float,
        fixed_wait_s: float,
    ) -> int:
        """Ask as far as was chosen, and decide how long to wait for it; the tokens to ask for.

        Where no wait pays, one proposal is asked for now and then. A session that is alone, and
        for which it would pay if it came at once, waits for it, as long as a step takes: one that
        is made beside a step can be much slower. Otherwise it comes too late, and shows what it
        would have been worth. `fixed_wait_s` above 0 is waited whatever was measured.
        """
        session.ask_nothing()
        session.ready_at_s, session.asked_len = now_s, 0
        choice = session.choice
        if choice is None or session.drafter is None:
            return 0
        length, most = len(session.tokens), draft_lens[1]
        worker = self.workers[session.drafter.worker_id]
        wait_s = worker.wait_s(choice, self._asking(session.drafter)) if session.shares else 0.0
        if choice.draft_len and fixed_wait_s:
            wait_s = fixed_wait_s
        looks = not wait_s
        if looks and not self._may_look(session, now_s):
            return 0
        tokens = choice.draft_len or min(policy.LOOK_TOKENS, most)
        if not worker.punctuality.may_ask(now_s, tokens * stakes.plain_s):
            return 0
        if looks:
            session.look_at_len = length + session.patience.pause()
            worker.note_look(now_s, tokens * worker.token_s)
            alone = stakes.sessions == 1
            if alone and worker.look_waits and worker.would_pay(session.record, stakes, most):
                wait_s = stakes.plain_s
        price = FREE if draft_lens[0] else choice.price
        session.want, session.looks = Want(length, tokens, now_s + wait_s, price), looks
        session.asked_at_s, session.asked_len = now_s, tokens
        return tokens

    def _may_ask(self, session: Session, now_s: float) -> bool:
        """Whether it is time to reckon whether a draft would pay: not in each plain step."""
        due = bool(session.asked_len) or len(session.tokens) >= session.choose_at_len
        return due or self._may_look(session, now_s)

    def _may_look(self, session: Session, now_s: float) -> bool:
        """Whether it may see what drafts would have been worth, should none be."""
        if session.drafter is None or len(session.tokens) < session.look_at_len:
            return False
        # One that is alone takes time from nobody else.
        from_s = self.workers[session.drafter.worker_id].look_from_s
        return len(self._sessions) == 1 or now_s >= from_s

    def _asking(self, drafter: DraftWorkerRef | None, but: Session | None = None) -> list[int]:
        """How far the sessions draft that ask this draft worker, or just did; one left out."""
        asking = (one for one in self._sessions.values() if one.asked_len and one is not but)
        return [one.asked_len for one in asking if one.drafter == drafter]

    def awaited(self, waits: Sequence[Session], now_s: float) -> list[Awaited]:
        """Those of the waiting sessions whose proposals can be expected, and when."""
        drafted = [(session, session.drafter) for session in waits if session.drafter is not None]
        found = (
            self.workers[drafter.worker_id].awaited(session, self._asking(drafter), now_s)
            for session, drafter in drafted
        )
        return [one for one in found if one is not None]

    def note_step(
        self,
        session: Session,
        began_s: float,
        idle_from_s: float,
        *,
        draft: Draft,
        accepted: int,
        stakes: policy.Stakes,
        fixed_wait_s: float,
    ) -> None:
        """The session takes a step, with a draft or without the one that it wanted.

        `idle_from_s` is when the step before it ended.
        `accepted` tokens came out of the `draft` that was verified. A `fixed_wait_s` above 0 is
        what a session may wait, however little there is to win.
        """
        if session.asked_at_s is None:
            return
        waited_s = max(began_s - session.asked_at_s, 0.0)
        want = session.want
        until_s = session.ready_at_s if want is None else began_s
        self.demand.waited_s += max(until_s - session.asked_at_s, 0.0)
        rows = len(draft.token_ids)
        if want is not None and session.drafter is not None:
            self._counters.missed_proposals += 1
            worker = self.workers[session.drafter.worker_id]
            worker.punctuality.note_missed(session.asked_at_s, began_s)
            longest = max(self._asking(session.drafter), default=0)
            sample = worker.latency.note(math.inf, longest)
            if session.looks:
                # Where waiting shows nothing either, every other one is not waited for.
                worker.look_waits = not worker.look_waits
            session.late = Late(
                want.base_len, want.draft_len, session.asked_at_s, sample, session.looks
            )
        else:
            if session.drafter is not None and not session.looks:
                held_s = began_s - max(session.ready_at_s, idle_from_s)
                self.workers[session.drafter.worker_id].note_held(max(held_s, 0.0))
            # One that was cut for want of rows or blocks says nothing about what is beyond.
            whole = session.draft is None or len(session.draft.token_ids) == rows
            self._record(session, session.asked_len if whole else levels_of(draft), draft, accepted)
        # The next look is put off already.
        if not session.looks and (want is None or want.wait_until_s > session.asked_at_s):
            saved_s = stakes.saved_s(accepted, rows) if want is None else 0.0
            longest_wait_s = fixed_wait_s or session.asked_len * stakes.plain_s
            pause = session.patience.note(waited_s, saved_s, longest_wait_s)
            session.resume_at_len = len(session.tokens) + pause if pause else 0
        session.ask_nothing()

    def note_committed(self, session: Session) -> None:
        """See what a draft that came too late would have been worth, once that can be seen."""
        late = session.late
        if late is None or not late.draft.token_ids:
            return
        levels = levels_of(late.draft)
        said = session.tokens[late.base_len : late.base_len + levels]
        right, missed = compared(late.draft, said)
        if missed or right < len(said) or len(said) == levels:
            self._record(session, late.draft_len, late.draft, right)
            session.late = None

    def _record(self, session: Session, asked: int, draft: Draft, accepted: int) -> None:
        """Count what came of a draft, for the session and for its draft worker."""
        if not asked:
            return
        rows = len(draft.token_ids)
        what = {"asked": asked, "levels": levels_of(draft), "rows": rows, "accepted": accepted}
        session.fade_record()
        session.record.note(**what)
        if session.drafter is not None:
            self.workers[session.drafter.worker_id].record.note_of_many(**what)
        self.demand.record.note_of_many(**what)

    def _note_late(self, session: Session, proposal: Proposal, now_s: float) -> None:
        """A proposal that was missed has come: remember how long it took and what it says."""
        late = session.late
        if late is None or session.drafter is None or proposal.base_len != late.base_len:
            return
        worker = self.workers[session.drafter.worker_id]
        worker.latency.correct(late.sample, now_s - late.asked_at_s)
        worker.note_answer()
        worker.note_cost(proposal, now_s - late.asked_at_s, late.sample.draft_len)
        if late.looks:
            # Nothing is held meanwhile, and nothing is known of it any more.
            worker.note_held(0.0)
            worker.note_look(late.asked_at_s, proposal.draft_us / 1e6)
        self.demand.note_proposal(proposal, late.draft_len, now_s - late.asked_at_s)
        draft, session.late = proposal.draft, None
        if not draft.token_ids:
            self._record(session, late.draft_len, draft, 0)
        elif not fault_of(draft, late.draft_len, session.rule, self._shape):
            late.draft, session.late = draft, late
            self.note_committed(session)

    def receive(self, worker_id: str, proposal: Proposal, now_s: float) -> list[Output]:
        """Keep a proposal that fits, drop any other; it came at `now_s`."""
        session = self._drafted_by(worker_id, proposal)
        if session is None:
            self._counters.stale_proposals += 1
            return []
        if layers := self.commands.layers:
            self.workers[worker_id].reads_hidden = layers in proposal.feature_layers
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
            if session.looks:
                worker.latency.forget()
                worker.note_look(session.asked_at_s, proposal.draft_us / 1e6)
            worker.latency.note(seconds, longest)
            worker.note_cost(proposal, seconds, longest)
            self.demand.note_proposal(proposal, want.draft_len, seconds)
        worker.note_answer()
        fault = fault_of(proposal.draft, want.draft_len, session.rule, self._shape)
        if fault:
            return self.malformed(worker_id, fault)
        session.reopened = 0
        if want.price.row:
            session.heeds_price = worker.heeds_price = proposal.draft.priced
        # An empty draft says that the drafter has nothing: a plain step at once.
        session.draft = proposal.draft if proposal.draft.token_ids else None
        return []

    def _drafted_by(self, worker_id: str, event: Proposal | DraftFailed) -> Session | None:
        """The session that a draft worker speaks of, if it drafts for it."""
        session = self._sessions.get(event.session_id)
        if session is None or session.drafter is None or event.epoch != session.epoch:
            return None
        return session if session.drafter.worker_id == worker_id else None

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
        session = self._drafted_by(worker_id, failure)
        if session is None or session.drafter is None:
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
