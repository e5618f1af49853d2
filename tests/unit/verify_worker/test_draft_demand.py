"""The demand for drafts is what sessions would ask for, whatever they get."""

import heapq
import itertools

import pytest

from outrider.messages import (
    CommitDraft,
    Draft,
    DraftWorkerRef,
    OpenDraft,
    Proposal,
    SpeculationOptions,
    Timings,
)
from tests.support.scheduling import Worker
from verify_worker.draft_demand import FIRST_TOKEN_S, Appetite, DraftDemand
from verify_worker.state import Plan

# A step of the target, and what its drafter takes for a token.
STEP_S, TOKEN_S = 0.02, 0.004
SESSIONS = 4


class Pool:
    """So many draft workers, each of which drafts for one session after the other."""

    def __init__(self, drafters: int, *, right: bool = True) -> None:
        self._free_s = [0.0] * drafters
        self._right = right
        self._due: list[tuple[float, int, Proposal]] = []
        self._order = itertools.count()
        self._read = 0
        self.busy_s = 0.0

    def take(self, worker: Worker) -> None:
        """Begin what has been asked for."""
        for output in worker.to_drafter[self._read :]:
            command = output.command
            if not isinstance(command, CommitDraft) or not command.draft_len:
                assert isinstance(command, CommitDraft | OpenDraft)
                continue
            number = int(output.worker.worker_id)
            took_s = TOKEN_S * command.draft_len
            begun_s = max(self._free_s[number], worker.now)
            self._free_s[number] = begun_s + took_s
            self.busy_s += took_s
            right = worker.right_draft(command.session_id, command.draft_len)
            wrong = [(token + 1) % 50 for token in right]
            proposal = Proposal(
                session_id=command.session_id,
                epoch=1,
                base_len=command.base_len + len(command.token_ids),
                draft=Draft(tuple(right if self._right else wrong)),
                timings=Timings(int((begun_s - worker.now) * 1e6), int(took_s * 1e6), 1),
                draft_us=int(took_s * 1e6),
            )
            heapq.heappush(self._due, (self._free_s[number], next(self._order), proposal))
        self._read = len(worker.to_drafter)

    def deliver(self, worker: Worker) -> None:
        """Bring what is there by now."""
        while self._due and self._due[0][0] <= worker.now:
            due_s, _, proposal = heapq.heappop(self._due)
            session = worker.scheduler.sessions[proposal.session_id]
            assert session.drafter is not None
            name = session.drafter.worker_id
            worker.take(worker.scheduler.drafts.receive(name, proposal, due_s))

    @property
    def next_s(self) -> float:
        return self._due[0][0] if self._due else float("inf")


def serve(drafters: int, *, right: bool = True, seconds: float = 2.5) -> tuple[float, float]:
    """(draft workers wanted, draft workers busy) over the second half of the time."""
    worker = Worker(blocks=4096, context_len=8192, draft_len=0)
    worker.runner.seconds = lambda rows: STEP_S
    pool = Pool(drafters, right=right)
    for number in range(SESSIONS):
        ref = DraftWorkerRef(str(number % drafters), "127.0.0.1:1") if drafters else None
        worker.start(f"s{number}", new=8000, drafter=ref)
    demand = worker.scheduler.drafts.demand
    half: tuple[float, float, float] | None = None
    while worker.now < seconds:
        pool.take(worker)
        pool.deliver(worker)
        if half is None and worker.now > seconds / 2:
            half = (worker.now, demand.busy_s, pool.busy_s)
        if not worker.step():
            wake = worker.scheduler.wake_at_s(worker.now)
            worker.now = min(pool.next_s, wake if wake is not None else float("inf"))
    assert half is not None
    passed_s = worker.now - half[0]
    return (demand.busy_s - half[1]) / passed_s, (pool.busy_s - half[2]) / passed_s


@pytest.fixture(scope="module")
def plenty() -> tuple[float, float]:
    """What is wanted and done with a draft worker for each session."""
    return serve(SESSIONS)


def test_the_demand_does_not_depend_on_how_many_draft_workers_there_are(
    plenty: tuple[float, float],
) -> None:
    # With a draft worker for each session, what is wanted is what is done.
    wanted, busy = plenty
    assert wanted == pytest.approx(busy, rel=0.25)
    # One is overloaded: its sessions get less than they would take.
    wanted_of_one, busy_of_one = serve(1)
    assert wanted_of_one == pytest.approx(wanted, rel=0.35)
    assert busy_of_one <= 1.0 < wanted_of_one


def test_without_draft_workers_there_is_a_demand() -> None:
    wanted, busy = serve(0, seconds=2.0)
    assert busy == 0
    assert wanted > 0


def test_drafts_that_are_never_right_are_not_in_demand(plenty: tuple[float, float]) -> None:
    assert serve(SESSIONS, right=False)[0] < 0.1 * plenty[0]


def test_sessions_that_do_not_speculate_have_no_demand() -> None:
    worker = Worker()
    worker.start(new=30, speculation=SpeculationOptions(enabled=False))
    worker.finish()
    assert worker.scheduler.drafts.demand.tokens == 0


def proposal(*, queue_us: int = 0, draft_us: int, together: int) -> Proposal:
    timings = Timings(queue_us=queue_us, compute_us=draft_us, batch_sessions=together)
    draft = Draft((1,))
    return Proposal(
        session_id="s", epoch=1, base_len=9, draft=draft, timings=timings, draft_us=draft_us
    )


def test_the_demand_of_a_session_is_a_share_of_a_draft_worker() -> None:
    demand, appetite = DraftDemand(), Appetite()
    # 40 ms for four tokens of each of four sessions; 10 ms are neither work nor queue.
    demand.note_proposal(proposal(queue_us=30_000, draft_us=40_000, together=4), 4, 0.08)
    assert (demand.token_s, demand.share_s) == pytest.approx((0.01, 0.0025))
    assert demand.overhead_s == pytest.approx(0.01)
    demand.count(appetite, 100.0)
    assert demand.busy_s == 0
    appetite.draft_len, appetite.round_s = 4, 0.1
    demand.count(appetite, 102.0)
    assert demand.tokens == pytest.approx(2.0 / 0.1 * 4)
    assert demand.busy_s == pytest.approx(80 * 0.0025)


def test_large_batches_do_not_hide_how_fast_a_draft_worker_is_without_them() -> None:
    demand = DraftDemand()
    demand.note_proposal(proposal(draft_us=12_000, together=1), 4, 0.02)
    for _ in range(200):
        demand.note_proposal(proposal(draft_us=96_000, together=8), 4, 0.1)
    assert demand.token_s == pytest.approx(0.003)
    assert demand.share_s == pytest.approx(0.003, rel=0.01)


def test_one_proposal_that_took_for_ever_is_no_demand_but_many_are() -> None:
    demand = DraftDemand()
    for _ in range(50):
        demand.note_proposal(proposal(draft_us=8_000, together=1), 4, 0.02)
    demand.note_proposal(proposal(draft_us=5_000_000, together=1), 4, 6.0)
    assert demand.share_s < 0.0025
    for _ in range(80):
        demand.note_proposal(proposal(draft_us=80_000, together=1), 4, 0.1)
    assert demand.share_s == pytest.approx(0.02, rel=0.05)


def test_time_without_blocks_is_no_demand() -> None:
    worker = Worker()
    worker.start(new=100, drafter=None)
    worker.step()
    worker.step()
    demand, session = worker.scheduler.drafts.demand, worker.scheduler.sessions["s"]
    before = demand.tokens
    assert before > 0
    worker.scheduler.reserve(Plan(work=(), preempted=(session,)))
    worker.now += 50.0
    worker.step()
    assert demand.tokens == before
    worker.step()
    assert demand.tokens > before


def test_a_draft_worker_can_not_invent_more_work_than_time_has_passed() -> None:
    demand = DraftDemand()
    demand.note_proposal(proposal(queue_us=2**62, draft_us=2**62, together=0), 4, 0.02)
    assert demand.share_s == pytest.approx(0.005)
    assert demand.overhead_s == 0
    assert DraftDemand().share_s == FIRST_TOKEN_S
