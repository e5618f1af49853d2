"""How long a draft worker that sent rubbish is shut out."""

from dataclasses import replace

from coordinator.quarantine import FIRST_S, LONGEST_S, Quarantine
from outrider.session.registry import Pool, WorkerRecord

WORKER = WorkerRecord(
    pool=Pool.DRAFT,
    worker_id="d1",
    address="d1:1",
    incarnation="i1",
    model="ngram",
    model_fingerprint="",
    tokenizer_fingerprint="",
    capacity=8,
    sessions=0,
    draining=False,
    context_len=0,
)
STARTED_AGAIN = replace(WORKER, incarnation="i2")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_each_quarantine_is_twice_as_long_up_to_a_limit() -> None:
    clock = Clock()
    quarantine = Quarantine(clock)
    terms = []
    for _ in range(9):
        assert not quarantine.holds(WORKER)
        seconds = quarantine.add(WORKER)
        assert seconds is not None
        terms.append(seconds)
        clock.now += seconds - 0.001
        assert quarantine.holds(WORKER)
        assert quarantine.workers == {("d1", "i1")}
        clock.now += 0.002
    assert terms[:3] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S]
    assert terms[-2:] == [LONGEST_S, LONGEST_S]
    assert quarantine.workers == set()


def test_many_reports_of_one_fault_count_once() -> None:
    quarantine = Quarantine(Clock())
    assert quarantine.add(WORKER) == FIRST_S
    assert [quarantine.add(WORKER) for _ in range(50)] == [None] * 50


def test_a_new_incarnation_starts_clean() -> None:
    clock = Clock()
    quarantine = Quarantine(clock)
    quarantine.add(WORKER)
    clock.now += FIRST_S
    quarantine.add(WORKER)
    assert not quarantine.holds(STARTED_AGAIN)
    assert quarantine.add(STARTED_AGAIN) == FIRST_S
    assert quarantine.workers == {("d1", "i1"), ("d1", "i2")}


def test_what_is_long_past_is_forgotten() -> None:
    clock = Clock()
    quarantine = Quarantine(clock)
    quarantine.add(WORKER)
    clock.now += FIRST_S + LONGEST_S
    assert quarantine.add(WORKER) == FIRST_S
