"""When a session stops waiting for drafts, and when it asks again."""

import pytest

from tests.support.scheduling import Worker
from tests.support.synthetic import VOCABULARY, plain_decoding
from verify_worker.policy import (
    FIRST_REST_S,
    INITIAL_STEP_S,
    LONGEST_REST_S,
    MISSES_TO_REST,
    REST_WAITS,
    Patience,
    Punctuality,
    StepClock,
)


@pytest.mark.parametrize("draft", [[], [VOCABULARY - 1] * 4])
@pytest.mark.parametrize("waits", [0.25, 0.9])
def test_drafts_that_are_not_worth_their_wait_are_given_up(draft: list[int], waits: float) -> None:
    worker = Worker(draft_len=4)
    worker.start(new=240)
    steps = 0
    while worker.scheduler.sessions:
        if worker.step():
            steps += 1
            continue
        wake = worker.scheduler.wake_at_s()
        assert wake is not None
        worker.now += waits * (wake - worker.now)
        want = worker.scheduler.sessions["s"].want
        assert want is not None
        worker.propose("s", draft[: want.draft_len])
    assert worker.tokens["s"] == plain_decoding(range(1, 6), 240)
    # Answering just in time, with nothing or with rubbish, must not slow a session for long.
    assert worker.now < 1.2 * 240 * 0.01


def test_patience_comes_back_when_drafts_pay_again() -> None:
    patience = Patience()
    assert [patience.note(4.0, 0.0, 4.0) for _ in range(5)] == [0, 0, 16, 32, 64]
    # Good and bad in turns does not reset the pauses; making the whole loss good does.
    assert [patience.note(0.0, 4.0, 4.0), patience.note(4.5, 0.0, 4.0)] == [0, 128]
    for _ in range(3):
        assert patience.note(0.0, 4.0, 4.0) == 0
    assert [patience.note(4.0, 0.0, 4.0) for _ in range(3)] == [0, 0, 16]


def test_any_step_bounds_what_a_decoding_step_takes() -> None:
    clock = StepClock()
    assert clock.step_s == INITIAL_STEP_S
    clock.observe(2.0, decoding=False)
    assert clock.step_s == INITIAL_STEP_S
    clock.observe(0.03, decoding=False)
    assert clock.step_s == 0.03
    clock.observe(0.02, decoding=True)
    assert clock.step_s == 0.02
    # Once measured, prefill says nothing, and a step that failed took no time.
    clock.observe(0.001, decoding=False)
    clock.observe(0.0, decoding=True)
    assert clock.step_s == 0.02


def test_rests_grow_up_to_a_limit_and_end_with_an_answer() -> None:
    draft_worker, now = Punctuality(), 0.0
    for _ in range(MISSES_TO_REST):
        assert draft_worker.may_ask(now, 0.01)
        draft_worker.note_missed(now, now + 0.01)
        now += 0.01
    rests = []
    for _ in range(1100):
        asked_at = draft_worker.rest_until_s
        assert not draft_worker.may_ask(asked_at - 0.001, 0.01)
        rests.append(asked_at - now)
        assert draft_worker.may_ask(asked_at, 0.01)
        # One is enough to find out.
        assert not draft_worker.may_ask(asked_at, 0.01)
        draft_worker.note_missed(asked_at, asked_at + 0.01)
        now = asked_at
    assert rests[0] == pytest.approx(FIRST_REST_S)
    assert rests[1:3] == [pytest.approx(2 * FIRST_REST_S), pytest.approx(4 * FIRST_REST_S)]
    assert max(rests) == pytest.approx(LONGEST_REST_S)
    draft_worker.note_in_time()
    assert draft_worker.may_ask(now, 0.01)
    assert draft_worker.may_ask(now, 0.01)


def test_a_rest_is_long_against_the_wait_that_it_saves() -> None:
    draft_worker = Punctuality()
    for number in range(MISSES_TO_REST):
        draft_worker.note_missed(10.0 * number, 10.0 * (number + 1))
    assert draft_worker.rest_until_s - 10.0 * MISSES_TO_REST == 10.0 * REST_WAITS
