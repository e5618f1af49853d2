"""What is known of a draft worker, and what it makes of the next draft."""

import pytest

from outrider.messages import Draft, Proposal
from tests.support.scheduling import Worker
from verify_worker.cost import CostModel, StepShape
from verify_worker.draft_figures import DraftWorker, levels_of
from verify_worker.draft_length import Record, Wait
from verify_worker.policy import Stakes


def proposal(draft_us: int, tokens: int = 4, parents: tuple[int, ...] = ()) -> Proposal:
    draft = Draft(tuple(range(tokens)), parents)
    return Proposal(session_id="s", epoch=1, base_len=1, draft=draft, draft_us=draft_us)


def stakes(sessions: int = 1, row_s: float = 0.0005) -> Stakes:
    cost = CostModel()
    for _ in range(30):
        for rows in (1, 2, 4, 8, 16, 32, 64, 128):
            cost.observe(StepShape.of(rows), 0.02 + row_s * (rows - 1))
    return Stakes(StepShape(sessions, sessions), cost, 16)


def known(token_s: float, accepted: int = 4) -> DraftWorker:
    """A draft worker of whose drafts up to twice so many tokens are accepted, 1 ms away."""
    worker = DraftWorker(token_s=token_s)
    for number in range(40):
        worker.record.note(asked=8, levels=8, rows=8, accepted=number % (2 * accepted + 1))
        worker.latency.note(0.001 + 8 * token_s, 8)
    return worker


def test_the_cost_of_a_token_is_what_is_reported() -> None:
    worker = DraftWorker()
    worker.note_cost(proposal(8000), seconds=0.01, longest=4)
    assert worker.token_s == pytest.approx(0.002)
    # Beside a draft of eight tokens it took as long as that.
    worker = DraftWorker()
    worker.note_cost(proposal(8000), seconds=0.01, longest=8)
    assert worker.token_s == pytest.approx(0.001)


@pytest.mark.parametrize("draft_us", [0, 10**6, 2**64 - 1])
def test_no_report_makes_a_token_dearer_than_the_proposal(draft_us: int) -> None:
    worker = DraftWorker()
    for _ in range(50):
        worker.note_cost(proposal(draft_us), seconds=0.01, longest=4)
    assert 0 <= worker.token_s <= 0.01 / 4 + 1e-12


def test_trees_that_are_malformed_and_empty_drafts_do_no_harm() -> None:
    worker = DraftWorker()
    worker.note_cost(proposal(100, 2, parents=(1, -1)), seconds=0.01, longest=0)
    worker.note_cost(proposal(100, 0), seconds=0.01, longest=0)
    assert worker.token_s == pytest.approx(0.0001)


def test_levels() -> None:
    assert levels_of(Draft((5, 6, 7))) == 3
    assert levels_of(Draft((5, 6, 7), (-1, -1, 0))) == 2
    assert levels_of(Draft()) == 0


def test_dear_tokens_make_drafts_short_and_dearer_ones_none() -> None:
    lengths = [
        known(token_s).choose(Record(), stakes(), (0, 16), ()).draft_len
        for token_s in (0.0, 0.004, 0.05)
    ]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[1] > lengths[2] == 0


def test_no_draft_makes_all_wait_that_is_longer_than_suits_them() -> None:
    good = Record()
    for _ in range(20):
        good.note(asked=16, levels=16, rows=16, accepted=15)
    worker = known(0.002, accepted=2)
    alone = worker.choose(good, stakes(), (0, 16), ())
    beside = worker.choose(good, stakes(), (0, 16), (3,) * 7)
    assert 0 < beside.draft_len < alone.draft_len
    # Where a token costs the drafter nothing, nobody waits for it.
    free = known(0.0, accepted=2)
    alone = free.choose(good, stakes(), (0, 16), ())
    assert free.choose(good, stakes(), (0, 16), (3,) * 7) == alone


def test_a_draft_comes_with_the_longest() -> None:
    wait = Wait(fixed_s=1.0, token_s=0.5, others=3, usual_len=4)
    assert [wait(tokens) for tokens in (1, 4, 6)] == [3.0, 3.0, 3.0 + 2 * 0.5 * 4]
    assert Wait(1.0, 0.5)(3) == 2.5


def test_without_drafts_a_session_takes_exactly_the_time_of_plain_steps() -> None:
    worker, plain = Worker(draft_len=0), Worker(draft_len=0)
    for seconds in (worker, plain):
        seconds.runner.seconds = lambda rows: 0.01 * rows
    # A row costs a step, so that no draft can pay, however right it is.
    cost = worker.scheduler.cost
    for _ in range(30):
        for rows in (1, 2, 4, 8):
            cost.observe(StepShape.of(rows), 0.01 * rows)
    record = worker.scheduler.drafts.workers["d1"].record
    for _ in range(20):
        record.note(asked=4, levels=4, rows=4, accepted=1)
    worker.start(new=60)
    plain.start(new=60, drafter=None)
    while worker.scheduler.sessions:
        assert worker.step()
    plain.finish()
    assert worker.now == plain.now
    assert worker.runner.rows_of_steps == plain.runner.rows_of_steps
    # It was looked at meanwhile.
    assert worker.scheduler.counters.missed_proposals > 0


def test_a_proposal_that_is_held_for_long_is_no_quicker_than_one_that_comes_late() -> None:
    worker, batch = known(token_s=0.0005), stakes(sessions=8, row_s=0.0002)
    assert worker.choose(Record(), batch, (0, 4), ()).draft_len > 0
    for _ in range(64):
        worker.note_held(0.5)
    assert worker.choose(Record(), batch, (0, 4), ()).draft_len == 0
    # What is not seen any more is forgotten.
    for _ in range(256):
        worker.note_held(0.0)
    assert worker.choose(Record(), batch, (0, 4), ()).draft_len > 0


@pytest.mark.parametrize("most", [4, 16])
def test_one_that_heeds_prices_is_asked_for_less_where_less_promises_more(most: int) -> None:
    worker, batch = known(token_s=0.0005, accepted=1), stakes(sessions=8, row_s=0.0005)
    worker.heeds_price = True
    choice = worker.choose(Record(), batch, (0, most), ())
    assert choice.pays
    assert choice.rate == max(
        worker.choose(Record(), batch, (least, most), ()).rate for least in range(most + 1)
    )
