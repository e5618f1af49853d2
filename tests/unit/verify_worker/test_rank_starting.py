"""Ranks have longer for the first steps of a split target, and only for these."""

from pathlib import Path

import pytest
from torch.distributed import FileStore

from outrider.model.blocks import BlockTable
from outrider.model.paged import Segment
from outrider.model.parallel import leader
from outrider.model.parallel.group import RankGroup
from outrider.model.parallel.messages import Kind, Order, encode
from tests.support.models import save_model
from tests.support.ranks import ForkedRanks
from verify_worker import calibration, target
from verify_worker.config import Settings
from verify_worker.ranks import Led, RankJob, lead_job


def test_the_check_and_the_calibration_are_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(save_model(tmp_path / "model"))
    told: list[Kind] = []

    def noted(order: Order) -> bytes:
        told.append(order.kind)
        return encode(order)

    def alone(_settings: Settings, _ranks: object, most_blocks: int) -> Led:
        group = RankGroup.join(FileStore(str(tmp_path / "store"), 1), 0, 1)
        job = RankJob(model=model, size=1, forward="lean", kv_memory="1MiB")
        return lead_job(job, group, most_blocks)

    monkeypatch.setattr(leader, "encode", noted)
    monkeypatch.setattr(target, "lead", alone)
    monkeypatch.setattr(calibration, "STEPS", calibration.STEPS[:1])
    split = target.load_target(
        Settings(model=model, redis_url="", forward="lean", numerics="fast"), ForkedRanks()
    )
    # One step at least of the check, and more than one of the calibration.
    assert told == [Kind.FIRST] * len(told)
    assert len(told) > 1 + calibration.REPEATS
    table = BlockTable()
    split.scheduler.pool.grow(table, 1)
    split.model.forward([Segment([1], table, 1)])
    assert told[-1] is Kind.STEP
    assert told.count(Kind.STEP) == 1
