"""Recorded drafts, played through the scheduler on a virtual clock."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.draft_length import LOOKUP_S, MACHINES, MODEL_S, Machine, Simulation, World
from bench.draft_traces import (
    MOST,
    RECORDED,
    Trace,
    load_traces,
    of_choices,
    of_lookups,
    save_traces,
)
from outrider.errors import ConfigError

CPU, FLAT, DEAR = MACHINES
TRACES = load_traces()


def world(drafter: str, machine: Machine = CPU, sessions: int = 1) -> World:
    traces = tuple(trace for trace in TRACES if trace.drafter == drafter)
    proposal_s = LOOKUP_S if drafter == "ngram" else MODEL_S
    return World(drafter, machine, sessions, proposal_s, traces)


def test_every_completion_is_said_whole() -> None:
    one = world("ngram", sessions=3)
    rates = Simulation(one, 0).run()
    assert len(rates.of_each) == len(one.traces)
    assert all(rate > 0 for rate in rates.of_each)


@pytest.mark.parametrize("drafter", ["ngram", "noise 0.05", "noise 0.1", "noise 0.2"])
def test_the_chosen_length_is_near_the_best_fixed_one(drafter: str) -> None:
    one = world(drafter)
    plain = Simulation(one, None).run().total
    fixed = [Simulation(one, k).run().total for k in (1, 2, 4, 8)]
    auto = Simulation(one, 0).run().total
    assert auto > 0.95 * max(plain, *fixed)


def test_a_drafter_that_is_never_right_costs_next_to_nothing() -> None:
    for machine in MACHINES:
        one = world("noise 0.05", machine)
        wrong = tuple(replace(t, accepted=(0,) * len(t.accepted)) for t in one.traces)
        never = replace(one, traces=wrong)
        plain, auto = Simulation(never, None).run(), Simulation(never, 0).run()
        assert auto.total > 0.98 * plain.total


def test_drafts_come_back_when_they_pay_again() -> None:
    right = Trace("right", "x", (MOST,) * 400, (MOST,) * 400)
    turns = replace(right, accepted=(0,) * 200 + (MOST,) * 200)
    one = World("turns", CPU, 1, MODEL_S, (turns,))
    plain, auto = Simulation(one, None).run(), Simulation(one, 0).run()
    # The second half could be said in no time; much of it is.
    assert auto.total > 1.3 * plain.total


def test_drafts_of_a_model_end_where_it_differs_from_the_text() -> None:
    found = list(of_choices([1, 2, 3, 4], [1, 2, 9, 4]))
    assert found == [(MOST, 2), (MOST, 1), (MOST, 0), (MOST, 1)]


def test_drafts_of_a_lookup_are_what_followed_before() -> None:
    found = list(of_lookups([5, 6, 7, 8, 9], [5, 6, 7, 1]))
    assert found[0] == (0, 0)
    # After 5 6 it proposes 7 8 9 5 6, of which 7 is right.
    assert found[2] == (5, 1)


def test_traces_are_read_as_written(tmp_path: Path) -> None:
    where = tmp_path / "traces.csv"
    save_traces(TRACES, where)
    assert load_traces(where) == TRACES
    assert where.read_text() == RECORDED.read_text()
    where.write_text("a,b\n")
    with pytest.raises(ConfigError, match="no traces"):
        load_traces(where)
