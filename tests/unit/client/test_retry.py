"""When a failed call is made again, on a clock and dice of the test."""

import pytest

from outrider._retry import FENCED_WITHIN_S, MAX_ANSWERED, MAX_FENCED, Attempts, Retry
from outrider.errors import (
    DeadlineError,
    FencedError,
    InternalError,
    InvalidRequestError,
    NoVerifyWorkerError,
    NumericsError,
    OutriderError,
    OverloadedError,
    SessionExistsError,
    UnavailableError,
)

GONE = UnavailableError("nobody is there")
RETRY = Retry(start_s=3, resume_s=60, first_pause_s=0.1, longest_pause_s=2)


class World:
    """Attempts on a clock that stands still, with dice that always give the longest pause."""

    def __init__(self, timeout_s: float | None = None, retry: Retry = RETRY) -> None:
        self.now = 100.0
        self.attempts = Attempts(retry, timeout_s, clock=lambda: self.now, chance=lambda: 1.0)

    def fail(
        self,
        error: OutriderError = GONE,
        endpoint: str = "a",
        known: tuple[str, ...] = ("a", "b"),
        *,
        begun: bool = True,
        answered: bool = False,
    ) -> float:
        return self.attempts.pause_s(error, endpoint, known, begun=begun, answered=answered)


def test_another_coordinator_is_tried_at_once_and_then_the_pauses_double() -> None:
    world = World()
    assert world.fail(endpoint="a") == 0
    assert world.fail(endpoint="b") == pytest.approx(0.1)
    pauses = [world.fail(endpoint=endpoint) for endpoint in "abababababab"]
    assert pauses[1::2] == pytest.approx([0.2, 0.4, 0.8, 1.6, 2, 2])
    assert all(0 < pause <= 2 for pause in pauses)


def test_pauses_are_random_between_nothing_and_the_longest() -> None:
    chances = iter([0.0, 0.25])
    attempts = Attempts(RETRY, None, clock=lambda: 0.0, chance=lambda: next(chances))
    pauses = [
        attempts.pause_s(GONE, "a", ["a"], begun=True, answered=False) for _ in range(2)
    ]  # fmt: skip
    assert pauses == pytest.approx([0, 0.05])


def test_a_token_gives_the_whole_time_and_the_short_pauses_again() -> None:
    world = World()
    for endpoint in "abababab":
        world.now += 7
        world.fail(endpoint=endpoint)
    world.attempts.progressed()
    assert world.fail(endpoint="a") == 0
    world.now += 59
    assert world.fail(endpoint="b") == pytest.approx(0.1)


def test_it_is_given_up_after_its_time_with_what_was_tried() -> None:
    world = World()
    world.fail()
    world.now += 60
    with pytest.raises(UnavailableError, match=r"2 tries over 60.0 s at a, b.*nobody is there"):
        world.fail(endpoint="b")


def test_the_time_runs_from_the_first_failure_and_not_from_the_last_token() -> None:
    world = World()
    world.now += 1000  # a long prefill
    assert world.fail() == 0


def test_a_completion_that_was_not_begun_has_less_time_and_its_own_error() -> None:
    world = World()
    world.fail(begun=False)
    world.now += 3
    with pytest.raises(UnavailableError) as raised:
        world.fail(endpoint="b", begun=False)
    assert raised.value is GONE


def test_no_time_gives_up_at_the_first_failure() -> None:
    world = World(retry=Retry(start_s=0, resume_s=0))
    with pytest.raises(UnavailableError) as raised:
        world.fail(known=("a",))
    assert raised.value is GONE


def test_the_deadline_comes_first() -> None:
    world = World(timeout_s=1.0)
    assert world.attempts.remaining_s == 1
    assert world.fail(known=("a",)) == pytest.approx(0.1)
    world.now += 0.95
    assert world.attempts.remaining_s == pytest.approx(0.05)
    with pytest.raises(DeadlineError, match=r"deadline of 1.0 s.*nobody is there"):
        world.fail(known=("a",))
    world.now += 1
    assert world.attempts.remaining_s == 0


@pytest.mark.parametrize(
    "kind",
    [InvalidRequestError, InternalError, NumericsError, SessionExistsError],
)
def test_what_would_be_said_again_is_not_asked_again(kind: type[OutriderError]) -> None:
    error = kind("no")
    with pytest.raises(kind) as raised:
        World().fail(error)
    assert raised.value is error


def test_a_full_coordinator_says_when_to_come_again() -> None:
    full = OverloadedError("full", retry_after_s=5.0)
    world = World()
    assert world.fail(full) == 0
    assert world.fail(full, endpoint="b") == 5
    # A new completion goes round once, and is then for the caller to bring again.
    new = World()
    assert new.fail(full, begun=False) == 0
    with pytest.raises(OverloadedError) as raised:
        new.fail(full, endpoint="b", begun=False)
    assert raised.value is full


def test_a_coordinator_without_verify_workers_has_waited_already() -> None:
    none = NoVerifyWorkerError("none is up")
    assert World().fail(none, known=("a",)) == pytest.approx(0.1)
    new = World()
    assert new.fail(none, begun=False) == 0
    with pytest.raises(NoVerifyWorkerError) as raised:
        new.fail(none, endpoint="b", begun=False)
    assert raised.value is none


def test_a_session_that_was_let_in_and_found_no_room_has_waited_enough() -> None:
    with pytest.raises(OverloadedError):
        World().fail(OverloadedError("full"), answered=True)


def test_two_that_take_a_session_from_each_other_do_not_do_so_for_ever() -> None:
    world = World()
    taken = FencedError("taken")
    for _ in range(MAX_FENCED):
        world.fail(taken, endpoint="b")
        world.attempts.progressed()
    with pytest.raises(FencedError):
        world.fail(taken)
    with pytest.raises(FencedError):
        World().fail(taken, begun=False)


def test_a_session_that_is_taken_now_and_then_goes_on() -> None:
    world = World()
    for _ in range(3 * MAX_FENCED):
        world.fail(FencedError("taken"), endpoint="b")
        world.attempts.progressed()
        world.now += FENCED_WITHIN_S / MAX_FENCED + 0.01


def test_the_time_in_which_a_call_works_is_no_time_without_an_answer() -> None:
    """Two coordinators die in one long prefill, far apart."""
    world = World()
    lost = UnavailableError("lost")
    assert world.fail(lost, answered=True) == 0
    world.now += 2 * Retry().resume_s
    assert world.fail(lost, endpoint="b", answered=True) == 0


def test_calls_that_are_answered_and_break_do_not_go_on_for_ever() -> None:
    world = World()

    def fail_again_and_again() -> None:
        for _ in range(1000):
            world.now += 1 + world.fail(UnavailableError("lost"), known=("a",), answered=True)

    with pytest.raises(UnavailableError, match="could not be resumed"):
        fail_again_and_again()
    assert world.now < 100 + MAX_ANSWERED * 2 + 2 * RETRY.resume_s
