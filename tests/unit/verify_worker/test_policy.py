"""When a session stops waiting for drafts, and when it asks again."""

import pytest

from outrider.messages import SpeculationOptions
from tests.support.scheduling import Worker
from tests.support.synthetic import VOCABULARY, plain_decoding
from verify_worker.cost import NOTHING, CostModel, StepShape
from verify_worker.policy import (
    FIRST_REST_S,
    LONGEST_REST_S,
    MISSES_TO_REST,
    REST_WAITS,
    Patience,
    Punctuality,
    Stakes,
    chunk_rows,
    draft_lens,
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
        wake = worker.scheduler.wake_at_s(worker.now)
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
    assert [patience.note(4.0, 0.0, 4.0) for _ in range(8)] == [0] * 5 + [16, 32, 64]
    # Good and bad in turns does not reset the pauses; making the whole loss good does.
    assert [patience.note(0.0, 4.0, 4.0), patience.note(4.5, 0.0, 4.0)] == [0, 128]
    for _ in range(5):
        assert patience.note(0.0, 4.0, 4.0) == 0
    assert [patience.note(4.0, 0.0, 4.0) for _ in range(6)] == [0] * 5 + [16]


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
    assert draft_worker.note_answer()
    assert not draft_worker.note_answer()
    assert draft_worker.may_ask(now, 0.01)
    assert draft_worker.may_ask(now, 0.01)


def test_a_rest_is_long_against_the_wait_that_it_saves() -> None:
    draft_worker = Punctuality()
    for number in range(MISSES_TO_REST):
        draft_worker.note_missed(10.0 * number, 10.0 * (number + 1))
    assert draft_worker.rest_until_s - 10.0 * MISSES_TO_REST == 10.0 * REST_WAITS


def steep(row_s: float) -> CostModel:
    """A machine on which a row takes `row_s`, after the first, which takes 10 ms."""
    cost = CostModel()
    for _ in range(30):
        for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            cost.observe(StepShape.of(rows), 0.01 + row_s * (rows - 1))
    return cost


def test_a_draft_saves_its_tokens_less_its_rows() -> None:
    step = StepShape(5, 1)
    free, dear = (Stakes(StepShape(1, 1), steep(row_s), 16, step) for row_s in (0.0, 0.01))
    assert free.plain_s == pytest.approx(0.01, rel=0.05)
    assert free.saved_s(accepted=4, rows=4) == pytest.approx(0.04, rel=0.1)
    assert free.saved_s(accepted=0, rows=4) <= 0
    # Where a row costs as much as a step, a draft that is half right saves nothing.
    assert dear.saved_s(accepted=2, rows=4) < 0
    assert len(free.steps_s) == 17


def test_who_does_without_waits_for_the_drafts_of_others_all_the_same() -> None:
    # The others have 30 rows; a plain step of this session would have them too.
    cost = steep(0.001)
    alone = Stakes(StepShape(1, 1), cost, 16, StepShape(5, 1))
    beside = Stakes(StepShape(8, 8), cost, 16, StepShape(42, 8))
    assert beside.saved_s(accepted=2, rows=4) > 2 * alone.saved_s(accepted=2, rows=4)


def test_rows_are_charged_as_if_everybody_drafted() -> None:
    alone, many = (Stakes(StepShape(n, n), steep(0.001), 16) for n in (1, 8))
    one_row_s = alone.steps_s[1] - alone.plain_s
    assert many.steps_s[1] - many.plain_s == pytest.approx(8 * one_row_s, rel=0.3)


def test_who_decides_the_draft_length() -> None:
    asks, leaves_open = SpeculationOptions(draft_len=6), SpeculationOptions()
    auto = SpeculationOptions(auto_draft_len=True)
    assert draft_lens(asks, 4, 100, 16, 99) == (6, 6)
    assert draft_lens(leaves_open, 4, 100, 16, 99) == (4, 4)
    assert draft_lens(leaves_open, 0, 100, 16, 99) == (0, 16)
    assert draft_lens(auto, 4, 100, 16, 99) == (0, 16)
    assert draft_lens(SpeculationOptions(enabled=False, draft_len=6), 4, 100, 16, 99) == (0, 0)
    # Near the end of the output, above the worker's limit, and where sessions share the rows.
    assert draft_lens(asks, 4, 3, 16, 99) == (2, 2)
    assert draft_lens(auto, 4, 3, 16, 99) == (0, 2)
    assert draft_lens(asks, 4, 1, 16, 99) == (0, 0)
    assert draft_lens(asks, 4, 100, 5, 99) == (5, 5)
    assert draft_lens(auto, 4, 100, 16, 8) == (0, 7)


def test_prefill_beside_decoding_takes_what_it_may() -> None:
    cost, eight = steep(0.001), StepShape(8, 8)
    rows = chunk_rows(eight, 0, cost, 512, 3.0)
    assert rows % 16 == 0
    bound = 3.0 * cost.seconds(eight)
    assert cost.seconds(eight + StepShape.of(rows, rows)) <= bound
    assert cost.seconds(eight + StepShape.of(rows + 16, rows + 16)) > bound


def test_prefill_alone_takes_the_whole_step() -> None:
    assert chunk_rows(NOTHING, 0, steep(0.001), 512, 3.0) == 512


def test_prefill_always_gets_on() -> None:
    assert chunk_rows(StepShape(8, 8), 4000, steep(1.0), 512, 1.0) == 16
    assert chunk_rows(StepShape(600, 600), 0, steep(0.0), 512, 3.0) == 16


def test_prefill_never_takes_more_than_the_step_has() -> None:
    assert chunk_rows(StepShape(8, 8), 0, steep(0.0), 128, 3.0) == 112


def test_a_wait_costs_a_batch_no_more_than_to_take_turns() -> None:
    alone = Stakes(StepShape(1, 1), steep(0.001), 16)
    many = Stakes(StepShape(8, 8), steep(0.001), 16)
    assert alone.delay_s(0.5, alone.steps_s[4]) == 0.5
    assert many.delay_s(0.004, many.steps_s[4]) == 0.004
    # 40 rows are 49 ms, twice 20 are 58 ms: 9 ms more, behind which up to 29 ms are hidden.
    for wait_s in (0.015, 0.025):
        assert many.delay_s(wait_s, many.steps_s[4]) == pytest.approx(0.009, rel=0.3)
    assert many.delay_s(0.05, many.steps_s[4]) == pytest.approx(0.03, rel=0.3)
