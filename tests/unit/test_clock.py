"""A clock that stands still while the process does."""

from outrider.clock import AwakeClock


def test_counts_what_passes_between_ticks() -> None:
    now = 5.0
    clock = AwakeClock(1.0, lambda: now)
    assert clock.seconds == 0.0
    for step in (0.25, 1.0, 1.5):
        now += step
        clock.tick()
    assert clock.seconds == 2.75


def test_a_tick_that_comes_far_too_late_counts_as_two() -> None:
    now = 0.0
    clock = AwakeClock(0.5, lambda: now)
    now = 60.0
    assert clock.tick() == 1.0
    now = 60.25
    assert clock.tick() == 1.25 == clock.seconds
