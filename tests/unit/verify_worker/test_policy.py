"""When a session stops waiting for drafts, and when it asks again."""

import pytest

from tests.support.scheduling import Worker
from tests.support.synthetic import VOCABULARY, plain_decoding
from verify_worker.policy import INITIAL_STEP_S, Patience


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
        wake = worker.scheduler.wake_at_s()
        assert wake is not None
        worker.now += waits * (wake - worker.now)
        want = worker.scheduler.sessions["s"].want
        assert want is not None
        worker.propose("s", draft[: want.draft_len])
    assert worker.tokens["s"] == plain_decoding(range(1, 6), 240)
    # Answering just in time, with nothing or with rubbish, must not slow a session for long.
    assert worker.now < 1.2 * 240 * 0.01 + INITIAL_STEP_S * 4


def test_patience_comes_back_when_drafts_pay_again() -> None:
    patience = Patience()
    assert [patience.note(4.0, 0.0, 4.0) for _ in range(5)] == [0, 0, 16, 32, 64]
    # Good and bad in turns does not reset the pauses; making the whole loss good does.
    assert [patience.note(0.0, 4.0, 4.0), patience.note(4.5, 0.0, 4.0)] == [0, 128]
    for _ in range(3):
        assert patience.note(0.0, 4.0, 4.0) == 0
    assert [patience.note(4.0, 0.0, 4.0) for _ in range(3)] == [0, 0, 16]
