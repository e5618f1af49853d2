"""The cost model against machines of which the truth is known, and one that is real."""

import csv
import random
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verify_worker.cost import INITIAL_STEP_S, NOTHING, CostModel, StepShape

Truth = Callable[[StepShape], float]


def flat_then_steep(shape: StepShape) -> float:
    """As a CPU that is bound by reading weights: the first rows are nearly free."""
    rows = 0.018 + 0.0009 * max(shape.rows - 8, 0)
    return rows + 0.0004 * (shape.sessions - 1) + 2e-6 * shape.context + 5e-7 * shape.pairs


def proportional(shape: StepShape) -> float:
    """As a machine on which every row costs as much as the first."""
    return 0.03 * shape.rows + 1e-6 * shape.context


def batch(*parts: tuple[int, int]) -> StepShape:
    return sum((StepShape.of(rows, context) for rows, context in parts), NOTHING)


def drawn(chance: random.Random) -> StepShape:
    sessions = chance.randint(1, 16)
    return batch(
        *((chance.choice([1, 1, 3, 5]), chance.randint(20, 2000)) for _ in range(sessions))
    )


def errors(model: CostModel, truth: Truth) -> list[float]:
    """Relative errors over plain, drafted and long-context steps of few and many sessions."""
    return [
        abs(model.seconds(shape) / truth(shape) - 1)
        for sessions in (1, 2, 4, 8, 16)
        for rows in (1, 3, 5)
        for context in (50, 500, 2000)
        for shape in [batch(*[(rows, context)] * sessions)]
    ]


def teach(model: CostModel, truth: Truth, steps: int, chance: random.Random, bad: float) -> None:
    """Steps with 10 % of noise, a share `bad` of which was held up by something else."""
    for _ in range(steps):
        shape = drawn(chance)
        held_up = chance.choice([3, 10, 100]) if chance.random() < bad else 1
        model.observe(shape, truth(shape) * chance.lognormvariate(0, 0.1) * held_up)


@pytest.mark.parametrize("truth", [flat_then_steep, proportional])
@pytest.mark.parametrize("seed", range(3))
def test_it_learns_what_steps_cost_through_noise_and_outliers(truth: Truth, seed: int) -> None:
    model, chance = CostModel(), random.Random(seed)
    teach(model, truth, 100, chance, 0.02)
    assert statistics.mean(errors(model, truth)) < 0.25
    teach(model, truth, 900, chance, 0.02)
    assert statistics.mean(errors(model, truth)) < 0.08
    assert max(errors(model, truth)) < 0.3


def test_a_machine_that_becomes_slower_is_believed_after_a_few_steps() -> None:
    model, chance = CostModel(), random.Random(1)
    teach(model, flat_then_steep, 500, chance, 0.0)
    teach(model, lambda shape: 3 * flat_then_steep(shape), 8, chance, 0.0)
    assert statistics.mean(errors(model, lambda shape: 3 * flat_then_steep(shape))) < 0.25


def test_shapes_that_are_not_seen_follow_the_speed_of_the_machine() -> None:
    model, chance = CostModel(), random.Random(2)
    teach(model, flat_then_steep, 500, chance, 0.0)
    wide = batch(*[(5, 100)] * 8)
    before = model.seconds(wide)
    for _ in range(2000):
        one = StepShape.of(1, 200)
        model.observe(one, 1.5 * flat_then_steep(one) * chance.lognormvariate(0, 0.1))
    assert model.seconds(StepShape.of(1, 200)) == pytest.approx(1.5 * 0.0184, rel=0.15)
    assert 1.15 < model.seconds(wide) / before < 1.7


def test_a_process_that_was_paused_hardly_counts() -> None:
    model, chance = CostModel(), random.Random(3)
    teach(model, flat_then_steep, 200, chance, 0.0)
    shape = batch((1, 100), (5, 100))
    before = model.seconds(shape)
    model.observe(shape, 3600.0)
    assert model.seconds(shape) < 1.1 * before


def test_the_first_step_says_how_long_others_take() -> None:
    model = CostModel()
    assert model.seconds(StepShape.of(1)) == INITIAL_STEP_S
    model.observe(StepShape.of(32), 0.02)
    assert 0.005 < model.seconds(StepShape.of(1)) < 0.02
    assert model.seconds(StepShape.of(32)) == pytest.approx(0.02)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_time_is_not_learned(seconds: float) -> None:
    model = CostModel()
    model.observe(StepShape.of(1), seconds)
    model.observe(NOTHING, 1.0)
    assert not model.measured


@given(
    st.lists(
        st.tuples(st.integers(1, 600), st.integers(1, 4000), st.floats(1e-4, 10.0)), max_size=60
    ),
    st.integers(1, 700),
    st.integers(0, 64),
    st.integers(0, 4000),
)
def test_more_never_costs_less(
    steps: list[tuple[int, int, float]], rows: int, more: int, context: int
) -> None:
    model = CostModel()
    for observed, at, seconds in steps:
        model.observe(StepShape.of(observed, at + observed), seconds)
    shape = StepShape.of(rows, context)
    cost = model.seconds(shape)
    assert cost > 0
    assert model.seconds(StepShape.of(rows + more, context + more)) >= cost
    assert model.seconds(shape + StepShape.of(1, 10)) >= cost
    assert model.marginal_s(shape, StepShape.of(1 + more, context)) >= 0
    assert model.seconds(NOTHING) == 0


def test_it_foresees_the_steps_of_a_real_model() -> None:
    """400 random steps of SmolLM2-135M on two threads: 1 to 8 sessions, drafts, some prefill."""
    with (Path(__file__).parent / "steps_of_smollm2.csv").open() as file:
        steps = list(csv.DictReader(file))
    model, wrong = CostModel(), []
    for step in steps:
        shape = StepShape(*(int(step[part]) for part in ("rows", "sessions", "context", "pairs")))
        seconds = float(step["seconds"])
        wrong.append(abs(model.seconds(shape) / seconds - 1))
        model.observe(shape, seconds)
    assert statistics.median(wrong[20:]) < 0.04
    assert statistics.mean(wrong[20:]) < 0.06
