"""What a bad or silent draft worker costs the sessions that are given to it."""

from outrider.errors import InvalidRequestError, UnavailableError
from outrider.messages import AssignDrafter, CloseDraft, CommitDraft, DraftFailed
from tests.support.scheduling import DRAFTER, OTHER, Worker
from tests.support.synthetic import VOCABULARY, plain_decoding
from verify_worker.drafts import MAX_REOPENINGS
from verify_worker.policy import LONGEST_REST_S, MISSES_TO_REST


def asked(worker: Worker) -> int:
    """How many proposals were asked for."""
    return sum(commit.draft_len > 0 for commit in worker.commands(CommitDraft))


def test_rubbish_closes_the_stream_and_speaks_no_more_on_it() -> None:
    worker = Worker(draft_len=4)
    worker.start()
    for number in range(3):
        assert worker.left == []
        worker.take(worker.scheduler.drafts.malformed("d1", f"fault {number}"))
    assert worker.left == ["d1"]
    assert isinstance(worker.lost[0].error, InvalidRequestError)
    # Any command would open the stream again.
    spoken = len(worker.to_drafter)
    worker.finish()
    assert len(worker.to_drafter) == spoken
    assert worker.commands(CloseDraft) == []


def test_one_more_malformed_draft_is_enough_after_a_quarantine() -> None:
    worker = Worker(draft_len=4)
    worker.start(new=40)
    for _ in range(3):
        worker.take(worker.scheduler.drafts.malformed("d1", "rubbish"))
    assign = AssignDrafter(session_id="s", epoch=1, drafter=DRAFTER)
    worker.take(worker.scheduler.drafts.assign(assign))
    worker.step()
    worker.propose("s", [VOCABULARY])
    assert worker.left == ["d1", "d1"]
    assert len(worker.lost) == 2


def test_a_draft_worker_that_refuses_a_session_is_not_taken_for_a_bad_one() -> None:
    worker = Worker()
    worker.start()
    failure = DraftFailed(session_id="s", epoch=1, error=InvalidRequestError("too long for me"))
    for _ in range(MAX_REOPENINGS + 1):
        worker.take(worker.scheduler.drafts.failed("d1", failure))
    (lost,) = worker.lost
    assert isinstance(lost.error, UnavailableError)
    assert "too long for me" in lost.error.message
    assert worker.left == []


def test_the_first_wait_is_no_longer_than_the_first_step_makes_likely() -> None:
    worker = Worker(draft_len=4)
    worker.start(prompt=40)
    worker.step()
    # The prefill took 0.01 s, so a decoding step takes no more.
    wake = worker.scheduler.wake_at_s(worker.now)
    assert wake is not None
    assert wake - worker.now <= 4 * worker.now


def test_a_silent_draft_worker_costs_its_first_sessions_only() -> None:
    worker = Worker(draft_len=4)
    for number in range(20):
        worker.start(f"s{number}", new=8)
        worker.finish()
    counters = worker.scheduler.counters
    assert asked(worker) == counters.missed_proposals
    # Three in a row, and then one after each rest of the second or two that all of this took.
    assert MISSES_TO_REST <= counters.missed_proposals <= MISSES_TO_REST + 1
    for number in range(20):
        assert worker.tokens[f"s{number}"] == plain_decoding(range(1, 6), 8)


def test_sessions_that_wait_together_miss_once() -> None:
    worker = Worker(draft_len=4, draft_wait_s=0.04)
    for number in range(6):
        worker.start(f"s{number}", prompt=5 + number, new=12)
    for _ in range(2):
        while worker.step():
            pass
        wake = worker.scheduler.wake_at_s(worker.now)
        assert wake is not None
        worker.now = wake
    worker.step()
    # Twelve misses, but only two times at which nothing had come.
    assert worker.scheduler.counters.missed_proposals == 12
    assert asked(worker) == 18


def test_a_draft_worker_that_answers_again_is_asked_by_everybody_again() -> None:
    worker = Worker(draft_len=4)
    worker.start("first", new=60)
    worker.finish()
    worker.now += LONGEST_REST_S
    # Two sessions, and one of them tries.
    worker.start("a", new=40)
    worker.start("b", new=40)
    before = asked(worker)
    worker.step()
    assert asked(worker) == before + 1
    (trying,) = [s for s in worker.scheduler.sessions.values() if s.want is not None]
    worker.propose(trying.session_id, worker.right_draft(trying.session_id, 4))
    worker.step()
    assert all(session.want is not None for session in worker.scheduler.sessions.values())


def test_another_draft_worker_is_asked_at_once() -> None:
    worker = Worker(draft_len=4)
    worker.start("first", new=30)
    worker.finish()
    worker.start("second", new=30, drafter=OTHER)
    before = asked(worker)
    worker.step()
    assert asked(worker) == before + 1


def test_a_stream_that_broke_starts_with_a_clean_record() -> None:
    worker = Worker(draft_len=4)
    worker.start("first", new=30)
    worker.finish()
    worker.take(worker.scheduler.drafts.lose("d1"))
    worker.start("second", new=30)
    before = asked(worker)
    worker.step()
    assert asked(worker) == before + 1
