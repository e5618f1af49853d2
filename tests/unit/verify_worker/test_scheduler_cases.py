"""Cases of drafts that come and stay away, and what the counters say of them."""

import pytest

from outrider.figures import SpeculationFigures
from outrider.messages import TokenOrigin
from tests.support.scheduling import Worker
from tests.support.synthetic import plain_decoding

NEW = 24
PLAIN = plain_decoding(range(1, 6), NEW)


@pytest.mark.parametrize("full_every", [1, 2, 3])
def test_case_25_empty_drafts_alternating_with_full_ones(full_every: int) -> None:
    worker = Worker()
    worker.start(new=NEW)
    rounds = 0
    for _ in range(200):
        if "s" in worker.ends:
            break
        if not worker.step() or "s" in worker.ends:
            continue
        rounds += 1
        draft = worker.right_draft("s", 4) if rounds % full_every == 0 else []
        worker.propose("s", draft)
    assert worker.tokens["s"] == PLAIN
    accepted = [origin for origin in worker.origins["s"] if origin is TokenOrigin.ACCEPTED]
    assert accepted


def test_case_25_all_drafts_missing() -> None:
    worker = Worker()
    worker.start(new=NEW)
    worker.finish()
    assert worker.tokens["s"] == PLAIN
    assert set(worker.origins["s"]) == {TokenOrigin.PLAIN}


def test_case_29_without_drafts_the_rate_is_nothing_and_no_nan() -> None:
    worker = Worker()
    worker.start(new=NEW)
    worker.finish()
    figures = worker.scheduler.counters.speculation
    assert (figures.drafts, figures.draft_tokens, figures.accepted_tokens) == (0, 0, 0)
    assert not figures.acceptance_rate
    assert not SpeculationFigures().acceptance_rate


def test_case_29_the_rate_is_never_above_one() -> None:
    worker = Worker()
    worker.start(new=NEW)
    for _ in range(200):
        if "s" in worker.ends:
            break
        if worker.step() and "s" not in worker.ends:
            worker.propose("s", worker.right_draft("s", 4))
            figures = worker.scheduler.counters.speculation
            assert 0 <= figures.accepted_tokens <= figures.draft_tokens
    figures = worker.scheduler.counters.speculation
    assert figures.draft_tokens
    # Every draft was right: bonus tokens must not count as accepted.
    assert figures.acceptance_rate == 1.0
