"""What measured latencies make of the scheduler: who is waited for, and who is held for whom."""

import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.messages import CommitDraft
from tests.support.scheduling import Worker
from tests.support.synthetic import plain_decoding

STEP_S = 0.01


class LateWorker(Worker):
    """A worker whose draft worker answers after `latency_s`, right or wrong."""

    def __init__(self, latency_s: float, right: int = 4, **limits: Any) -> None:
        super().__init__(**{"draft_len": 4, **limits})
        self._latency_s = latency_s
        self._right = right
        self._seen = 0
        self._coming: list[tuple[float, str, int]] = []

    def turn(self) -> bool:
        """What has come, then a step, or on to what comes next."""
        for sent in self.to_drafter[self._seen :]:
            if isinstance(sent.command, CommitDraft) and sent.command.draft_len:
                sid = sent.command.session_id
                length = len(self.scheduler.sessions[sid].tokens)
                self._coming.append((self.now + self._latency_s, sid, length))
        self._seen = len(self.to_drafter)
        for arrival in [one for one in self._coming if one[0] <= self.now]:
            self._coming.remove(arrival)
            self._answer(*arrival)
        if self.step():
            return True
        wake = self.scheduler.wake_at_s(self.now)
        assert wake is not None
        assert wake > self.now, "nothing to do, and no time to wait for"
        self.now = min([wake, *(at for at, _, _ in self._coming)])
        return False

    def _answer(self, at_s: float, sid: str, base_len: int) -> None:
        if sid not in self.scheduler.sessions:
            return
        tokens = self.scheduler.sessions[sid].tokens[:base_len]
        draft = plain_decoding(tokens, 4)
        draft[self._right :] = [(token + 1) % 50 for token in draft[self._right :]]
        now, self.now = self.now, at_s
        self.propose(sid, draft, base_len=base_len)
        self.now = now

    def run(self) -> None:
        while self.scheduler.sessions:
            self.turn()


@settings(deadline=None, max_examples=40)
@given(st.floats(1e-4, 1.0), st.integers(0, 4), st.integers(1, 4))
def test_however_late_and_however_wrong_drafts_cost_little(
    latency_s: float, right: int, sessions: int
) -> None:
    worker = LateWorker(latency_s, right, blocks=200)
    for number in range(sessions):
        worker.start(f"s{number}", prompt=5 + number, new=200)
    worker.run()
    for number in range(sessions):
        assert worker.tokens[f"s{number}"] == plain_decoding(range(1, 6 + number), 200)
    # Plainly it is 200 steps; some rounds are lost until it is known that they are.
    assert worker.now < 1.1 * 200 * STEP_S


def test_good_drafts_in_time_are_worth_their_wait() -> None:
    worker = LateWorker(0.005)
    worker.start(new=200)
    worker.run()
    assert worker.now < 0.4 * 200 * STEP_S
    assert worker.scheduler.counters.missed_proposals <= 1


def test_a_worker_that_is_too_late_is_looked_at_without_waiting() -> None:
    worker = LateWorker(0.5)
    worker.start(new=200)
    worker.run()
    # One wait, of no more than a fair draft saves; then every step is on time.
    assert worker.now < (200 + 4) * STEP_S
    asked = [command for command in worker.commands(CommitDraft) if command.draft_len]
    assert 2 <= len(asked) <= 8
    assert worker.scheduler.counters.speculation.drafts == 0


def test_a_late_draft_shows_what_it_was_worth() -> None:
    worker = LateWorker(0.05, right=3)
    worker.start(new=60)
    worker.run()
    seen = worker.scheduler.drafts.workers["d1"]
    # The last one may still be on its way when the session ends.
    came = [latency for latency in seen.latency.seconds if latency < math.inf]
    assert came
    assert all(abs(latency - 0.05) < 1e-9 for latency in came)
    assert seen.record.drafts > 0
    # Three tokens were right each time, and the fourth, where it was asked for, was not.
    assert seen.record.accepted.hits[:3] == seen.record.accepted.trials[:3]
    assert not any(seen.record.accepted.hits[3:])


def test_a_worker_that_becomes_fast_is_waited_for_again() -> None:
    worker = LateWorker(0.5)
    worker.start("first", new=100)
    worker.run()
    worker._latency_s = 0.002
    worker.start("second", prompt=9, new=250)
    worker.run()
    assert worker.scheduler.counters.speculation.accepted_tokens > 100


def prompt_pair() -> Worker:
    """Two sessions whose proposals take 1 ms, which is known, and which have just asked."""
    worker = Worker(draft_len=4)
    worker.start("a", new=40)
    worker.start("b", prompt=6, new=40)
    worker.step()
    for _ in range(6):
        assert not worker.step()
        worker.now += 0.001
        worker.propose("a", worker.right_draft("a", 4))
        worker.propose("b", worker.right_draft("b", 4))
        assert worker.step()
    assert not worker.step()
    worker.now += 0.0008
    return worker


def test_a_step_is_held_for_a_draft_that_is_about_to_come() -> None:
    worker = prompt_pair()
    worker.propose("a", worker.right_draft("a", 4))
    # One is ready, the other due in 0.2 ms: the step waits for it.
    assert worker.scheduler.plan(worker.now) is None
    wake = worker.scheduler.wake_at_s(worker.now)
    assert wake is not None
    assert worker.now < wake < worker.now + 0.001
    # It does not come: the step goes without it, and no later than that.
    plan = worker.scheduler.plan(wake)
    assert plan is not None
    assert [work.session.session_id for work in plan.work] == ["a"]


def test_a_session_that_has_given_up_is_held_with_the_others() -> None:
    worker = prompt_pair()
    want = worker.scheduler.sessions["a"].want
    assert want is not None
    want.wait_until_s = worker.now - 0.0001
    assert worker.scheduler.plan(worker.now) is None
    wake = worker.scheduler.wake_at_s(worker.now)
    assert wake is not None
    assert wake > worker.now
    plan = worker.scheduler.plan(wake)
    assert plan is not None
    assert [work.rows for work in plan.work] == [1]


def test_a_step_is_not_held_when_nobody_waits() -> None:
    worker = Worker(draft_len=4)
    worker.start("a", drafter=None, new=40)
    worker.start("b", drafter=None, new=40)
    for _ in range(5):
        assert worker.step()


def test_a_prompt_beside_decoding_comes_in_chunks_that_fit() -> None:
    worker = Worker(blocks=200, step_tokens=512, context_len=4096, prefill_slowdown=2.0)
    worker.runner.seconds = lambda rows: 0.01 + 0.001 * rows
    worker.start("short", new=300, drafter=None)
    for _ in range(80):
        worker.step()
    worker.start("long", tokens=[t % 40 for t in range(1500)], new=2, drafter=None)
    before = len(worker.runner.rows_of_steps)
    while "long" not in worker.tokens:
        worker.step()
    shared = worker.runner.rows_of_steps[before:]
    # A decoding step takes 11 ms, so 16 rows are what a step of about 22 ms has room for.
    assert max(shared) <= 33
    alone = Worker(blocks=200, step_tokens=512, context_len=4096)
    alone.start("long", tokens=[t % 40 for t in range(1500)], new=2, drafter=None)
    alone.step()
    assert alone.runner.rows_of_steps == [512]
