"""Which sessions work in the next step, and what follows from it. No model, no clock, no I/O.

    plan    = scheduler.plan(now)              # reads only
    scheduler.reserve(plan)                    # blocks change hands
    outcome = runner.run(plan)                 # the forward pass
    outputs = scheduler.apply(plan, outcome, now)

`plan` gives nothing also while it pays to hold the step for drafts that are about to come.
A session's tokens change only in `apply`, after the forward pass succeeded; a failed one
leaves nothing to undo. Time is seconds on any monotonic clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.errors import FencedError, InvalidRequestError, OutriderError
from outrider.messages import (
    FREE,
    FinishReason,
    Progress,
    SessionEnded,
    SessionFailed,
    StartSession,
    Timings,
)
from outrider.model.blocks import BLOCK_TOKENS, BlockPool
from outrider.sampling.endings import first_ending
from verify_worker import policy, waiting
from verify_worker.batch import form_batch
from verify_worker.cost import CostModel, StepShape
from verify_worker.drafts import Drafts
from verify_worker.endings import checked_endings
from verify_worker.malformed import DraftShape
from verify_worker.prefix_cache import PrefixCache
from verify_worker.state import (
    Counters,
    Decided,
    Outcome,
    Output,
    Plan,
    Session,
    ToCoordinator,
    Work,
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the scheduler may do.

    `step_tokens` bounds the rows of a step, prefill chunks included; a step that prefills
    beside decoding sessions takes at most `prefill_slowdown` times as long as without.
    `draft_len` 0 chooses the draft length each round. `draft_wait_s` 0 lets measurements
    decide how long a draft is waited for. `q_top` is how many tokens a drafter's distribution
    may have under the rejection rule; 0 is all. Sessions of one tenant may be drafted from each
    other's outputs at this model, which `corpus` names; without a name they may not. `layers` is
    how many the target has.
    """

    context_len: int
    vocab_size: int
    max_sessions: int = 64
    step_tokens: int = 256
    prefill_slowdown: float = 3.0
    draft_len: int = 0
    max_draft_len: int = 16
    max_tree_nodes: int = 64
    draft_wait_s: float = 0.0
    q_top: int = 64
    corpus: str = ""
    layers: int = 0


class Scheduler:
    """The sessions of a verify worker, oldest first.

    `cost` is learned from every step. `gather` decides whether a step waits for drafts.
    `kv_fingerprint` (`outrider.model.prefix`) turns the prefix cache on.
    """

    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        cost: CostModel | None = None,
        gather: waiting.Gather = waiting.hold_until_s,
        kv_fingerprint: str = "",
    ) -> None:
        self.cost = cost or CostModel()
        self.sessions: dict[str, Session] = {}
        self.counters = Counters()
        shape = DraftShape(limits.vocab_size, limits.max_tree_nodes)
        self.drafts = Drafts(
            self.sessions, self.counters, shape, limits.q_top, limits.corpus, limits.layers
        )
        self.pool = pool
        self.prefixes = PrefixCache(pool, self.counters, kv_fingerprint)
        self._limits = limits
        self._gather = gather
        self._stepped_at_s = 0.0

    @property
    def running(self) -> int:
        """Sessions that take part in steps; the others wait for their turn."""
        return min(len(self.sessions), self._limits.max_sessions)

    # --- commands of the coordinator -----------------------------------------------------

    def start(self, command: StartSession, owner: int) -> list[Output]:
        """Take a session; one with the same id and a lower epoch is replaced."""
        held = self.sessions.get(command.session_id)
        if held is not None and held.epoch >= command.epoch:
            error: OutriderError = FencedError(
                f"session {command.session_id} is here already with epoch {held.epoch}"
            )
            return [_failed(command.session_id, command.epoch, owner, error)]
        outputs = self._replace(held, command.epoch, owner) if held is not None else []
        try:
            endings = checked_endings(
                command,
                context_len=self._limits.context_len,
                vocab_size=self._limits.vocab_size,
                kv_tokens=self.pool.total * BLOCK_TOKENS,
            )
        except InvalidRequestError as invalid:
            return [*outputs, _failed(command.session_id, command.epoch, owner, invalid)]
        session = Session(
            session_id=command.session_id,
            epoch=command.epoch,
            owner=owner,
            tokens=list(command.token_ids),
            prompt_len=command.prompt_len,
            sampling=command.sampling,
            endings=endings,
            speculation=command.speculation,
            logprobs=command.logprobs,
            traceparent=command.traceparent,
            tenant=command.tenant,
        )
        session.drafter = session.may_use(command.drafter)
        if session.remaining <= 0:
            ended = SessionEnded(
                session_id=session.session_id, epoch=session.epoch, reason=FinishReason.LENGTH
            )
            return [*outputs, ToCoordinator(owner, ended)]
        self.prefixes.note_tokens(session)
        self.sessions[session.session_id] = session
        stakes = policy.Stakes(_one_row_each(self._taking_part), self.cost, self._most_drafted)
        return [*outputs, *self.drafts.begin(session, stakes, self._draft_lens(session, stakes))]

    def _replace(self, held: Session, epoch: int, owner: int) -> list[Output]:
        """Forget a session that is started again; another owner has to hear of it."""
        outputs = self._forget(held)
        if held.owner != owner:
            error = FencedError(f"session {held.session_id} was started again with epoch {epoch}")
            outputs.append(_failed(held.session_id, held.epoch, held.owner, error))
        return outputs

    def close(self, session_id: str, epoch: int) -> list[Output]:
        """Forget a session; an older epoch means nothing any more."""
        session = self.sessions.get(session_id)
        if session is None or session.epoch > epoch:
            return []
        return self._forget(session)

    def close_owner(self, owner: int) -> list[Output]:
        """Forget every session of a Decode stream that ended."""
        gone = [session for session in self.sessions.values() if session.owner == owner]
        return [output for session in gone for output in self._forget(session)]

    # --- the step ------------------------------------------------------------------------

    def plan(self, now_s: float) -> Plan | None:
        """The next step; None when nobody can work now, or it pays to hold the step."""
        plan, hold_until_s = self._decide(now_s)
        return plan if plan.work and hold_until_s is None else None

    def wake_at_s(self, now_s: float) -> float | None:
        """When to plan again if nothing comes before; None when nobody waits for a draft.

        Then a session that waits gives up, or a step has been held for as long as it pays.
        """
        wants = [session.want for session in self.sessions.values() if session.want is not None]
        hold_until_s = self._decide(now_s)[1] if wants else None
        if hold_until_s is None:
            return min((want.wait_until_s for want in wants), default=None)
        # Those that have given up are held with the others.
        later = [want.wait_until_s for want in wants if want.wait_until_s > now_s]
        return min(hold_until_s, *later)

    def reserve(self, plan: Plan) -> None:
        """Take blocks from the preempted and give the workers what their rows need."""
        # First what is adopted has users; then nobody can evict it.
        for work in plan.work:
            self.prefixes.adopt(work)
        for session in plan.preempted:
            self.pool.release(session.table)
            session.draft = session.want = session.asked_at_s = None
            session.appetite.counted_s = None
            self.counters.preemptions += 1
        for work in plan.work:
            self.pool.grow(work.session.table, work.session.table.kv_len + work.rows)

    def apply(self, plan: Plan, outcome: Outcome, now_s: float) -> list[Output]:
        """Commit what the step decided."""
        self.counters.steps += 1
        self.counters.rows += plan.rows
        self.counters.compute_s += outcome.compute_s
        self.cost.observe(plan.shape, outcome.compute_s)
        idle_from_s, self._stepped_at_s = self._stepped_at_s, now_s
        deciding = {w.session.session_id: w.session for w in plan.work if w.decides}
        waits = {s.session_id: s for s in self._taking_part if s.want is not None}
        decoding = _one_row_each([*(deciding | waits).values()])
        stakes = policy.Stakes(decoding, self.cost, self._most_drafted, plan.shape)
        timings = Timings(compute_us=int(outcome.compute_s * 1e6), batch_sessions=len(plan.work))
        outputs: list[Output] = []
        for work, result in zip(plan.work, outcome.results, strict=True):
            match result:
                case None:
                    work.session.table.kv_len += work.committed_rows
                    work.session.ready_at_s = now_s
                    self.prefixes.seal(work.session)
                case Decided():
                    outputs += self._commit(work, result, timings, stakes, now_s, idle_from_s)
                case OutriderError():
                    outputs += self.fail(work.session, result)
        # When all is known of the step.
        together = [
            (work.session, result)
            for work, result in zip(plan.work, outcome.results, strict=True)
            if isinstance(result, Decided) and work.session.session_id in self.sessions
        ]
        for session, _ in together:
            self.drafts.note_committed(session)
        lens = {one.session_id: self._draft_lens(one, stakes) for one, _ in together}
        self.drafts.choose(lens, stakes, now_s)
        for session, result in together:
            outputs += self._ask(session, result, stakes, now_s)
        return outputs

    def fail(self, session: Session, error: OutriderError) -> list[Output]:
        """End one session with an error."""
        self.counters.failed_sessions += 1
        failed = _failed(session.session_id, session.epoch, session.owner, error)
        # A fault of the target may lie in the KV; that of a request does not.
        return [failed, *self._forget(session, keep=isinstance(error, InvalidRequestError))]

    # --- parts ---------------------------------------------------------------------------

    @property
    def _taking_part(self) -> list[Session]:
        return list(self.sessions.values())[: self._limits.max_sessions]

    def _decide(self, now_s: float) -> tuple[Plan, float | None]:
        """The next step, and until when it pays to hold it for drafts."""
        candidates: list[Work] = []
        waits: list[Session] = []
        for session in self._taking_part:
            work = self._work(session, now_s)
            if work is None:
                waits.append(session)
            else:
                candidates.append(work)
        holders = [session for session in self.sessions.values() if session.table.blocks]
        chunk_rows = self._chunk_rows(candidates, waits)
        plan = form_batch(candidates, holders, self.pool, self._limits.step_tokens, chunk_rows)
        awaited = self.drafts.awaited(waits, now_s) if plan.work else []
        if not awaited:
            return plan, None
        since_s = max(min(w.session.ready_at_s for w in plan.work), self._stepped_at_s)
        return plan, self._gather(now_s, plan.shape, since_s, awaited, self.cost.seconds)

    def _chunk_rows(self, candidates: Sequence[Work], waits: Sequence[Session]) -> int:
        """Rows for prefill in a step of the candidates, while others wait for drafts."""
        first = next((work for work in candidates if work.committed_rows > 1), None)
        if first is None:
            return 0
        decoding = [work.session for work in candidates if work.committed_rows == 1]
        return policy.chunk_rows(
            _one_row_each([*decoding, *waits]),
            first.start,
            self.cost,
            self._limits.step_tokens,
            self._limits.prefill_slowdown,
        )

    def _work(self, session: Session, now_s: float) -> Work | None:
        """What the session would do now; None while it waits for its draft."""
        keeps = self.drafts.reads_hidden(session, now_s)
        if session.pending > 1:
            adoption = self.prefixes.adoption(session)
            kv_len = adoption.kv_len if adoption else session.table.kv_len
            rows = len(session.tokens) - kv_len
            return Work(session, rows, adoption=adoption, keeps_hidden=keeps)
        if session.draft is not None:
            return Work(session, 1, session.draft, keeps_hidden=keeps)
        if session.want is not None and now_s < session.want.wait_until_s:
            return None
        return Work(session, 1, keeps_hidden=keeps)

    def _commit(
        self,
        work: Work,
        decided: Decided,
        timings: Timings,
        stakes: policy.Stakes,
        now_s: float,
        idle_from_s: float,
    ) -> list[Output]:
        session = work.session
        before = len(session.tokens) - session.prompt_len
        kept, ending = first_ending(decided.verdict.token_ids, before, session.endings)
        verdict = decided.verdict.cut(kept)
        began_s = now_s - timings.compute_us / 1e6
        self.drafts.demand.count(session.appetite, now_s)
        self.drafts.note_step(
            session,
            began_s,
            idle_from_s,
            draft=work.draft,
            accepted=verdict.accepted,
            stakes=stakes,
            fixed_wait_s=self._limits.draft_wait_s,
        )
        progress = Progress(
            session_id=session.session_id,
            epoch=session.epoch,
            base_len=len(session.tokens),
            token_ids=verdict.token_ids,
            origins=verdict.origins,
            draft_tokens=verdict.draft_tokens,
            logprobs=decided.logprobs[:kept],
            timings=timings,
            cached_tokens=session.cached_tokens,
        )
        # Rows of rejected tokens stay in the blocks, beyond kv_len, and are overwritten.
        session.table.kv_len += work.committed_rows + verdict.accepted
        session.tokens.extend(verdict.token_ids)
        self.prefixes.note_tokens(session)
        self.prefixes.seal(session)
        session.figures.add_round(verdict.draft_tokens, verdict.accepted)
        self.counters.speculation.add_round(verdict.draft_tokens, verdict.accepted)
        self.counters.committed_tokens += kept
        outputs: list[Output] = [ToCoordinator(session.owner, progress)]
        if ending is None:
            self.pool.trim(session.table, session.table.kv_len)
            return outputs
        ended = SessionEnded(session_id=session.session_id, epoch=session.epoch, reason=ending)
        return [*outputs, ToCoordinator(session.owner, ended), *self._forget(session)]

    def _ask(
        self, session: Session, decided: Decided, stakes: policy.Stakes, now_s: float
    ) -> list[Output]:
        """Tell the draft worker what was committed and ask for the next proposal.

        The session goes on, so the verdict was committed whole.
        """
        lens = self._draft_lens(session, stakes)
        tokens = self.drafts.ask(session, stakes, lens, now_s, self._limits.draft_wait_s)
        return self.drafts.commands.commit(
            session,
            len(decided.verdict.token_ids),
            decided.hidden,
            draft_len=tokens,
            price=session.want.price if session.want is not None else FREE,
        )

    def _draft_lens(self, session: Session, stakes: policy.Stakes) -> tuple[int, int]:
        """The fewest and the most tokens to ask for."""
        return policy.draft_lens(
            session.speculation,
            self._limits.draft_len,
            session.remaining,
            self._most_drafted,
            self._limits.step_tokens // max(stakes.sessions, 1),
        )

    @property
    def _most_drafted(self) -> int:
        return min(self._limits.max_draft_len, self._limits.step_tokens - 1)

    def _forget(self, session: Session, *, keep: bool = True) -> list[Output]:
        """Drop the session; `keep` leaves its KV to others."""
        self.pool.release(session.table, keep=keep)
        self.sessions.pop(session.session_id, None)
        return self.drafts.commands.close(session)


def _failed(session_id: str, epoch: int, owner: int, error: OutriderError) -> ToCoordinator:
    return ToCoordinator(owner, SessionFailed(session_id=session_id, epoch=epoch, error=error))


def _one_row_each(sessions: Sequence[Session]) -> StepShape:
    """The step in which these sessions decode plainly."""
    context = sum(len(session.tokens) for session in sessions)
    return StepShape(len(sessions), len(sessions), context)
