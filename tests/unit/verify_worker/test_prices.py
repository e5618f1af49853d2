"""What drafts are charged, and drafts that are asked for without hope."""

import pytest

from outrider.messages import FREE, CommitDraft, Draft, SpeculationOptions
from tests.support.scheduling import Worker
from verify_worker.draft_length import Position, choose

CPU = tuple(0.02 + 0.001 * rows for rows in range(17))


def wanted(worker: Worker) -> CommitDraft:
    """The last commit that asks for a proposal."""
    commits: list[CommitDraft] = worker.commands(CommitDraft)
    return [commit for commit in commits if commit.draft_len][-1]


def test_a_row_costs_the_tokens_that_would_come_meanwhile() -> None:
    at_once = choose([Position(1.0, 0.8)] * 8, CPU, lambda _: 0.0)
    assert at_once.price.second == pytest.approx(at_once.tokens / at_once.step_s)
    assert at_once.price.row == pytest.approx(0.001 * at_once.price.second)
    # Whoever waits longer gets fewer tokens meanwhile.
    later = choose([Position(1.0, 0.8)] * 8, CPU, lambda _: 0.02)
    assert later.price.second < at_once.price.second
    # Rows that cost nothing have a price all the same.
    free = choose([Position(1.0, 0.8)] * 8, [0.02] * 9, lambda _: 0.0)
    assert free.price.row > 0


def test_a_tree_is_charged_for_all_of_its_rows() -> None:
    chain, tree = (
        choose([Position(1.0, 0.5, width)] * 4, CPU, lambda _: 0.0, least=4) for width in (1.0, 3.0)
    )
    assert chain.step_s == pytest.approx(CPU[4])
    assert tree.step_s == pytest.approx(CPU[12])


def test_where_the_price_decides_as_much_as_is_of_use_is_asked_for() -> None:
    worker = Worker(max_draft_len=8)
    worker.start(new=40)
    worker.step()
    first = wanted(worker)
    assert 0 < first.draft_len < 8
    assert first.price.row > 0
    worker.propose("s", [], draft=Draft(tuple(worker.right_draft("s", 2)), priced=True))
    worker.step()
    assert wanted(worker).draft_len == 8
    # A drafter that says no more of prices is asked for what is expected to be best.
    worker.propose("s", [], draft=Draft(tuple(worker.right_draft("s", 1))))
    worker.step()
    assert wanted(worker).draft_len < 8


def test_a_length_that_was_set_has_no_price() -> None:
    worker = Worker(max_draft_len=8)
    worker.start(new=40, speculation=SpeculationOptions(True, 3))
    worker.step()
    assert (wanted(worker).draft_len, wanted(worker).price) == (3, FREE)


def without_hope() -> Worker:
    """A worker whose session has a draft worker that is known to be much too slow."""
    worker = Worker()
    worker.start(new=200)
    worker.step()
    for _ in range(8):
        worker.scheduler.drafts.workers["d1"].latency.note(1.0, 4)
    worker.propose("s", worker.right_draft("s", 1))
    worker.step()
    return worker


def test_a_look_is_waited_for_and_what_comes_counts_for_all_that_was_known() -> None:
    worker = without_hope()
    session = worker.scheduler.sessions["s"]
    want = session.want
    assert want is not None
    assert session.looks
    # As long as a plain step takes.
    assert want.wait_until_s - worker.now == pytest.approx(0.01, rel=0.1)
    assert not worker.step()
    worker.propose("s", worker.right_draft("s", 4))
    assert worker.scheduler.drafts.workers["d1"].latency.seconds == (0.0,)
    worker.step()
    assert session.want is not None
    assert not session.looks


def test_a_look_in_vain_is_followed_by_one_that_is_not_waited_for() -> None:
    worker = without_hope()
    session = worker.scheduler.sessions["s"]
    waits = []
    for _ in range(200):
        if session.want is not None:
            waits.append(session.want.wait_until_s > worker.now)
            worker.now = max(worker.now, session.want.wait_until_s)
        worker.step()
        if not worker.scheduler.sessions:
            break
    assert waits[:4] == [True, False, True, False]
