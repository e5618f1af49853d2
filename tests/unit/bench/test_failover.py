"""Which gap counts as the time to the next token."""

import pytest

from bench.failover import next_token_s


def test_the_end_of_the_gap_after_the_kill_counts() -> None:
    # The token at 10.01 was on its way when the process was killed at 10.
    times = [9.8, 9.9, 10.01, 11.5, 11.6]
    assert next_token_s(times, 10.0) == pytest.approx(1.5)


def test_the_first_token_after_it_if_none_was_on_its_way() -> None:
    assert next_token_s([9.9, 10.0, 10.8, 10.9], 10.0) == pytest.approx(0.8)


def test_nothing_came() -> None:
    assert next_token_s([9.9], 10.0) is None
    assert next_token_s([], 10.0) is None
