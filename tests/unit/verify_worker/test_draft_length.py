"""How far to draft: what is learned from drafts, and the length that it makes best."""

import math
import operator
import random
from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verify_worker.draft_length import (
    FIRST_CHANCE,
    FIRST_PRESENT,
    Choice,
    Position,
    Record,
    Tally,
    choose,
    outlook,
)

MOST = 16
# SmolLM2-135M on two cores: seconds of a step by rows of one session.
CPU = (
    0.0206,
    0.0230,
    0.0240,
    0.0249,
    0.0255,
    0.0260,
    0.0266,
    0.0271,
    *(0.0281 + 0.001 * r for r in range(9)),
)


def always(chance: float, present: float = 1.0, positions: int = MOST) -> list[Position]:
    return [Position(present, chance)] * positions


def at_once(tokens: int) -> float:
    return 0.0


def recorded(drafts: Sequence[tuple[int, int]], asked: int = 8) -> Record:
    """A record of drafts, each with its length and how many of its tokens were accepted."""
    record = Record()
    for levels, accepted in drafts:
        record.note(asked=asked, levels=levels, rows=levels, accepted=accepted)
    return record


# --- what is learned ---------------------------------------------------------------------------


def test_a_series_is_tried_up_to_its_first_miss() -> None:
    tally = Tally()
    tally.note(hits=2, limit=4)
    tally.note(hits=4, limit=4)
    tally.note(hits=0, limit=0)
    assert tally.trials == [2, 2, 2, 1]
    assert tally.hits == [2, 2, 1, 1]
    assert tally.at(9) == (0, 0)
    tally.fade(0.5)
    assert tally.at(0) == (1, 1)


def test_nothing_known_is_a_guess() -> None:
    for position in outlook(Record(), Record(), 4):
        assert position.accepted == pytest.approx(FIRST_CHANCE)
        assert position.present == pytest.approx(FIRST_PRESENT)
        assert position.width == 1


def test_what_was_seen_often_is_what_is_expected() -> None:
    chance = random.Random(3)
    chances = [0.9, 0.7, 0.5, 0.3]
    drafts = []
    for _ in range(400):
        levels = 4 if chance.random() < 0.6 else 0
        accepted = 0
        while accepted < levels and chance.random() < chances[accepted]:
            accepted += 1
        drafts.append((levels, accepted))
    found = outlook(recorded(drafts, asked=4), Record(), 4)
    for position, expected in zip(found, chances, strict=True):
        assert position.accepted == pytest.approx(expected, abs=0.08)
    assert found[0].present == pytest.approx(0.6, abs=0.05)
    assert found[1].present > 0.95


def test_a_new_session_is_like_the_others_of_its_drafter() -> None:
    others = recorded([(8, 1)] * 60)
    found = outlook(Record(), others, 2)
    assert found[0].accepted > 0.9
    assert found[1].accepted < 0.15


def test_a_session_that_differs_is_told_from_the_others_at_every_position() -> None:
    others = recorded([(8, 2)] * 60 + [(8, 4)] * 30)
    good = outlook(recorded([(3, 3)] * 10, asked=3), others, 6)
    usual = outlook(Record(), others, 6)
    # Also beyond what the session itself has tried.
    assert good[4].accepted > usual[4].accepted
    bad = outlook(recorded([(3, 0)] * 10, asked=3), others, 6)
    assert bad[0].accepted < 0.35
    assert bad[3].accepted < usual[3].accepted


def test_levels_of_trees_count_with_their_width() -> None:
    record = Record()
    for _ in range(5):
        record.note(asked=4, levels=4, rows=12, accepted=2)
    assert outlook(record, Record(), 4)[0].width == 3


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=30))
def test_chances_are_chances(drafts: list[tuple[int, int]]) -> None:
    record = recorded([(levels, min(accepted, levels)) for levels, accepted in drafts])
    for own, others in ((record, Record()), (Record(), record), (record, record)):
        for position in outlook(own, others, 12):
            assert 0 < position.present < 1
            assert 0 < position.accepted < 1


# --- what is chosen ----------------------------------------------------------------------------


def best_by_hand(
    expected: Sequence[Position], steps_s: Sequence[float], wait_s: float, token_s: float
) -> int:
    """The length of most tokens per second, reckoned from scratch for each one."""

    def rate(length: int) -> float:
        there = [math.prod(p.present for p in expected[: at + 1]) for at in range(length)]
        right = [math.prod(p.accepted for p in expected[: at + 1]) for at in range(length)]
        tokens = 1 + sum(a * b for a, b in zip(there, right, strict=True))
        rows = [share * (steps_s[at + 1] - steps_s[at]) for at, share in enumerate(there)]
        waited = wait_s + length * token_s if length else 0.0
        return tokens / (steps_s[0] + sum(rows) + waited)

    return max(range(len(expected) + 1), key=rate)


@given(
    st.lists(st.tuples(st.floats(0.3, 1), st.floats(0.5, 0.95)), min_size=1, max_size=6),
    st.lists(st.floats(0.0, 0.01), min_size=6, max_size=6),
    st.floats(0, 0.05),
    st.floats(0, 0.01),
)
def test_the_choice_gives_most_tokens_per_second(
    chances: list[tuple[float, float]], rows_s: list[float], wait_s: float, token_s: float
) -> None:
    expected = [Position(present, accepted) for present, accepted in chances]
    steps_s = [0.02]
    for row_s in rows_s:
        steps_s.append(steps_s[-1] + row_s)
    found = choose(expected, steps_s, lambda tokens: wait_s + tokens * token_s)
    added = list(accumulate((present * accepted for present, accepted in chances), operator.mul))
    # Positions from the first that adds next to nothing are not looked at.
    considered = [share for share in added if share >= 0.01]
    assert found.draft_len == best_by_hand(expected[: len(considered)], steps_s, wait_s, token_s)


def test_better_drafts_are_longer_and_dearer_rows_make_them_shorter() -> None:
    lengths = [choose(always(c), CPU, at_once).draft_len for c in (0.02, 0.3, 0.6, 0.8, 0.95)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 0
    assert lengths[-1] > 8
    for chance in (0.5, 0.8):
        dearer = [
            choose(always(chance), [0.02 + row_s * r for r in range(17)], at_once).draft_len
            for row_s in (0.0001, 0.002, 0.006, 0.02)
        ]
        assert dearer == sorted(dearer, reverse=True)
        assert dearer[-1] == 0


def test_slow_drafters_are_asked_for_less() -> None:
    def after(token_s: float) -> int:
        return choose(always(0.7), CPU, lambda tokens: tokens * token_s).draft_len

    lengths = [after(token_s) for token_s in (0.0, 0.001, 0.005, 0.02)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[2]
    assert lengths[-1] == 0


def test_many_sessions_shorten_the_drafts_of_all() -> None:
    # Each row more is a row more for everyone in the step.
    def steps_s(sessions: int) -> list[float]:
        return [0.02 + 0.001 * sessions * (1 + rows) for rows in range(17)]

    lengths = [choose(always(0.7), steps_s(n), at_once).draft_len for n in (1, 4, 16, 128)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] >= 4
    assert lengths[-1] <= 1


def test_a_plain_step_costs_a_plain_step() -> None:
    assert choose(always(0.01), CPU, at_once) == Choice(0, 1.0, CPU[0], CPU[0])
    assert choose([], CPU, at_once) == Choice(0, 1.0, CPU[0], CPU[0])
    assert Choice(0, 1.0, CPU[0], CPU[0]).gain_s == 0


def test_a_fixed_length_is_kept_whatever_it_costs() -> None:
    found = choose(always(0.01, positions=4), CPU, lambda _: 100.0, least=4)
    assert found.draft_len == 4
    assert found.gain_s < 0


def test_rows_that_often_are_not_there_cost_less() -> None:
    steps_s = [0.02, 0.03, 0.04, 0.05, 0.06]
    surely = choose([Position(1.0, 0.9)] * 4, steps_s, at_once, least=4)
    rarely = choose([Position(0.1, 0.9), *[Position(1.0, 0.9)] * 3], steps_s, at_once, least=4)
    assert surely.step_s - surely.plain_s == pytest.approx(0.04)
    assert rarely.step_s - rarely.plain_s == pytest.approx(0.004)
    assert rarely.tokens - 1 == pytest.approx(0.1 * (surely.tokens - 1))
