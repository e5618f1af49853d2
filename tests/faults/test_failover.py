"""What `python -m bench failover` counts, once each: streams go on, and their logs are whole."""

import math
from pathlib import Path

import pytest

from bench.failover import COORDINATOR, HANG, LETTERS, VERIFY, Settings, measure
from bench.tiny import write_model

ONE_OF_EACH = Settings(
    model="tiny", kills=1, hangs=1, redis_down_s=3.0, sessions=6, new_tokens=180, pace_s=0.06
)


@pytest.mark.timeout(300)
async def test_streams_go_on_after_each_fault(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", letters=LETTERS)
    trial, streams = await measure(ONE_OF_EACH, str(model), LETTERS)
    assert streams.failed == []
    # Each had streams, and each of these got a next token.
    assert set(trial.seconds) == {VERIFY, COORDINATOR, HANG}
    # While Valkey was down the same calls went on, and nothing is missing in the logs afterwards.
    assert len(trial.redis_gaps_s) == ONE_OF_EACH.sessions
    assert trial.reconnects == 0
    assert len(trial.catch_up_s) == ONE_OF_EACH.sessions
    assert max(trial.catch_up_s) < math.inf
    assert max(trial.redis_gaps_s) < ONE_OF_EACH.redis_down_s
