"""The chart's probes and grace periods, carried out on real processes (`python -m bench probes`).

Periods and thresholds are those of the rendered chart, all of them divided by the same number.
"""

from pathlib import Path

import pytest

from bench.load import LETTERS
from bench.probe_trials import CONTEXT, STARTUP_S, Outcome, load_slowly, trial, under_load
from bench.tiny import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("probes") / "model"
    return write_model(where, letters=LETTERS, end=True, context=CONTEXT)


@pytest.mark.timeout(300)
async def test_a_load_of_minutes_is_waited_for_and_one_without_end_is_not(model: Path) -> None:
    loading = await load_slowly(model, speed=20)
    # The probe had been asked and had failed, more often than any other may.
    assert set(loading.failed) == {"coordinator-0", "verify-0", "draft-0"}
    assert min(loading.failed.values()) > 3
    assert loading.restarts == 0
    assert loading.early == []
    assert STARTUP_S * 0.9 < loading.never_s < float("inf")


@pytest.mark.timeout(300)
async def test_hangs_are_ended_and_long_work_and_drains_are_not(model: Path) -> None:
    outcome = Outcome()
    async with trial(model, 8, outcome) as release:
        await release.prefill()
        async with under_load(release, outcome):
            await release.hang()
            await release.stop()
            await release.drain()
    assert outcome.prefill_s > 2 * outcome.patience_s
    assert set(outcome.failed_in_prefill.values()) == {0}
    # The socket of an engine that hangs answers; a process that is stopped says nothing.
    assert {(one.pod, one.answer) for one in outcome.hung} == {
        ("verify-0", "NOT_SERVING"),
        ("draft-0", "NOT_SERVING"),
    }
    assert {(one.pod, one.answer) for one in outcome.stopped} == {
        ("coordinator-1", "DEADLINE_EXCEEDED"),
        ("verify-1", "DEADLINE_EXCEEDED"),
        ("draft-1", "DEADLINE_EXCEEDED"),
    }
    assert [one.pod for one in (*outcome.hung, *outcome.stopped) if not one.unready] == []
    assert outcome.restarted_for_nothing == []
    # One of each was deleted while the others went on.
    assert len(outcome.drained) == 3
    assert [drain for drain in outcome.drained if not drain.in_order] == []
    # Whatever happened, every completion came, and with the same words as before.
    assert len(outcome.load.said) > 0
    assert outcome.load.failed == {}
    assert outcome.load.torn == []
    assert outcome.different == []
