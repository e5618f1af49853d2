"""What `python -m bench cancel` times, a few streams each way: the workers hold nothing then."""

from pathlib import Path

import pytest

from bench.cancel import LETTERS, WAYS, Settings, measure
from bench.tiny import write_model

A_FEW = Settings(model="tiny", streams=6, at_once=2, pace_s=0.02)


@pytest.mark.timeout(300)
async def test_case_27_workers_hold_nothing_after_any_way_to_leave(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", letters=LETTERS)
    trial = await measure(A_FEW, str(model), LETTERS)
    assert trial.streams == A_FEW.streams
    assert set(trial.seconds) == {(way, pool) for way in WAYS for pool in ("verify", "draft")}
