"""Whether a draft is worth its wait, and whether a step is held for drafts."""

import math
import random
from collections.abc import Callable

from hypothesis import assume, given
from hypothesis import strategies as st

from verify_worker.cost import StepShape
from verify_worker.draft_length import Choice
from verify_worker.waiting import (
    SAMPLES,
    Awaited,
    Latency,
    best_wait_s,
    due_s,
    hold_until_s,
    who_wait,
)

seconds = st.floats(1e-4, 100.0)
latencies = st.lists(seconds | st.just(math.inf), min_size=1, max_size=SAMPLES).map(
    lambda found: tuple(sorted(found))
)


def flat(shape: StepShape) -> float:
    """Rows are free: a step of anything takes 20 ms."""
    return 0.02 if shape.rows else 0.0


def awaited(*due: float, latency_s: float = 0.01, rows: int = 5) -> list[Awaited]:
    return [Awaited(at, latency_s, StepShape.of(rows)) for at in due]


def choice(tokens: float, wait_s: float, rows_s: float = 0.0) -> Choice:
    """A draft that is expected to give so many tokens, beside plain steps of 20 ms."""
    return Choice(4, tokens, 0.02 + rows_s, 0.02, wait_s)


# --- who drafts, where all wait for it? -------------------------------------------------------


def held(wait_s: float, step_s: float) -> float:
    """Steps are held for drafts, and everybody waits."""
    return wait_s


def who(offers: list[Choice], delay_s: Callable[[float, float], float] = held) -> list[int]:
    """Who of a batch drafts; one for which nothing is offered has a draft that saves nothing."""
    named = {str(number): offer for number, offer in enumerate(offers)}
    return sorted(map(int, who_wait(named, len(offers), delay_s)))


NOTHING_TO_WIN = choice(1.0, 0.0)


def test_a_lone_session_drafts_as_soon_as_it_gains() -> None:
    assert who([choice(1.6, 0.01)]) == [0]
    assert who([choice(1.4, 0.01)]) == []
    assert who([]) == []


def test_a_wait_of_all_is_paid_by_those_who_draft() -> None:
    # Eight wait 5 ms each: 40 ms, and some to spare. A draft saves its session 20 ms.
    one = choice(2.0, 0.005)
    assert who([one] * 2 + [NOTHING_TO_WIN] * 6) == []
    assert who([one] * 4 + [NOTHING_TO_WIN] * 4) == [0, 1, 2, 3]
    assert who([one] * 2) == [0, 1]


def test_one_that_its_rows_eat_up_does_not_draft() -> None:
    dear = choice(2.0, 0.001, rows_s=0.019)
    assert who([dear, choice(2.0, 0.001)]) == [1]


def test_late_drafts_are_left_out_where_they_hold_the_others_up() -> None:
    early, late = choice(2.5, 0.001), choice(2.5, 0.03)
    assert who([late, early, early]) == [1, 2]
    assert who([late] * 4) == []
    # Good ones are worth it.
    assert who([choice(4.0, 0.03)] * 4) == [0, 1, 2, 3]


def test_a_wait_that_hides_behind_the_steps_of_others_is_not_charged() -> None:
    late = [choice(2.5, 0.03)] * 4
    assert who(late) == []
    assert who(late, lambda wait_s, step_s: min(wait_s, 0.01)) == [0, 1, 2, 3]


# --- is a draft worth its wait? ---------------------------------------------------------------


@given(latencies, st.floats(-1.0, 100.0), seconds)
def test_nobody_waits_longer_than_could_ever_pay(
    found: tuple[float, ...], gain_s: float, limit_s: float
) -> None:
    wait = best_wait_s(found, gain_s, limit_s)
    assert 0 <= wait <= limit_s
    if wait:
        arrived = [latency for latency in found if latency <= wait]
        spent = sum(arrived) + (len(found) - len(arrived)) * wait
        # On what was measured it pays, in the mean.
        assert len(arrived) * gain_s > spent


@given(latencies, seconds)
def test_what_saves_nothing_is_not_waited_for(found: tuple[float, ...], limit_s: float) -> None:
    assert best_wait_s(found, 0.0, limit_s) == 0
    assert best_wait_s((math.inf,) * len(found), 1e9, limit_s) == 0


@given(latencies, seconds, seconds)
def test_a_worker_that_is_later_than_its_drafts_are_worth_is_not_waited_for(
    found: tuple[float, ...], gain_s: float, limit_s: float
) -> None:
    assume(min(found) > gain_s)
    assert best_wait_s(found, gain_s, limit_s) == 0


def test_a_prompt_worker_is_waited_for_with_room_to_spare() -> None:
    wait = best_wait_s((0.009, 0.01, 0.012), gain_s=0.05, limit_s=0.08)
    assert 0.015 < wait <= 0.08


def test_the_slow_half_of_two_kinds_of_answers_is_not_waited_for() -> None:
    wait = best_wait_s((0.01,) * 8 + (10.0,) * 8, gain_s=1.0, limit_s=20.0)
    assert 0.01 <= wait < 1.0


# --- when is it due? --------------------------------------------------------------------------


@given(latencies, seconds, seconds)
def test_a_proposal_is_due_after_now_and_before_the_wait_ends(
    found: tuple[float, ...], waited_s: float, wait_s: float
) -> None:
    due = due_s(found, waited_s, wait_s)
    if due is not None:
        assert waited_s <= due <= wait_s or math.isclose(due, wait_s)


def test_what_is_later_than_ever_is_not_expected() -> None:
    assert due_s((0.01, 0.02), 0.0, 1.0) == 0.015
    assert due_s((0.01, 0.02), 0.015, 1.0) == 0.02
    assert due_s((0.01, 0.02), 0.02, 1.0) is None
    assert due_s((), 0.0, 1.0) is None


# --- is the step held? ------------------------------------------------------------------------

moments = st.floats(0.0, 0.2)


@given(
    st.integers(1, 8),
    st.lists(moments, max_size=8),
    moments,
    st.floats(0.0, 0.1),
    st.floats(0.001, 0.2),
    st.floats(0.0, 0.05),
)
def test_no_step_is_held_for_longer_than_it_takes(
    ready: int, due: list[float], now_s: float, held_s: float, latency_s: float, row_s: float
) -> None:
    def step_s(shape: StepShape) -> float:
        return 0.02 + row_s * (shape.rows - 1) if shape.rows else 0.0

    shape = StepShape(ready, ready)
    since_s = now_s - held_s
    until = hold_until_s(now_s, shape, since_s, awaited(*due, latency_s=latency_s), step_s)
    if until is not None:
        assert now_s < until <= since_s + step_s(shape)
        assert until in due


@given(st.integers(1, 8), moments)
def test_no_step_is_held_when_nobody_is_expected(ready: int, now_s: float) -> None:
    assert hold_until_s(now_s, StepShape(ready, ready), now_s, [], flat) is None
    overdue = awaited(now_s - 0.01)
    assert hold_until_s(now_s, StepShape(ready, ready), now_s, overdue, flat) is None


def test_a_step_is_held_for_drafts_that_are_about_to_come() -> None:
    ready = StepShape.of(5)
    assert hold_until_s(1.0, ready, 1.0, awaited(1.002, 1.003), flat) == 1.003


def test_a_step_is_not_held_for_one_among_many() -> None:
    def steep(shape: StepShape) -> float:
        return 0.02 * shape.rows

    many = StepShape(16, 16)
    assert hold_until_s(1.0, many, 1.0, awaited(1.018), steep) is None


def test_the_last_of_many_is_left_out() -> None:
    def rows_cost(shape: StepShape) -> float:
        return 0.015 + 0.001 * shape.rows if shape.rows else 0.0

    ready = StepShape.of(5)
    assert hold_until_s(1.0, ready, 1.0, awaited(1.001, 1.001, 1.015), rows_cost) == 1.001
    assert hold_until_s(1.0, ready, 1.0, awaited(1.001, 1.001, 1.002), rows_cost) == 1.002


# --- what was measured ------------------------------------------------------------------------


def test_a_late_answer_replaces_the_missing_one() -> None:
    latency = Latency()
    sample = latency.note(math.inf)
    latency.note(0.01)
    assert latency.seconds == (0.01, math.inf)
    latency.correct(sample, 0.5)
    assert latency.seconds == (0.01, 0.5)


def test_only_the_last_latencies_count() -> None:
    latency, chance = Latency(), random.Random(0)
    old = latency.note(math.inf)
    for _ in range(SAMPLES):
        latency.note(chance.random())
    assert math.inf not in latency.seconds
    latency.correct(old, 7.0)
    assert len(latency.seconds) == SAMPLES
    assert latency.seconds[-1] == 7.0


def test_what_never_came_is_forgotten_on_demand() -> None:
    latency = Latency()
    for found in (math.inf, 0.1, math.inf):
        latency.note(found)
    latency.forget_missing()
    assert latency.seconds == (0.1,)
