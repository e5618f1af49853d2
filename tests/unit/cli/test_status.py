"""`outrider status` against a scripted coordinator."""

import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from outrider.cli import main
from outrider.pb.v1 import coordinator_pb2 as pb
from outrider.pb.v1 import types_pb2
from tests.support.fake_coordinator import FakeCoordinator, serving_in_thread


@pytest.fixture
def fake() -> Iterator[FakeCoordinator]:
    with serving_in_thread([]) as coordinator:
        coordinator.status = pb.GetStatusResponse(
            workers=[
                pb.WorkerInfo(
                    pool=pb.WORKER_POOL_VERIFY,
                    worker_id="verify-1",
                    address="10.0.0.1:5001",
                    model="big",
                    sessions=3,
                    capacity=64,
                    connected=True,
                    dtype="bfloat16",
                    numerics="invariant",
                ),
                pb.WorkerInfo(pool=pb.WORKER_POOL_VERIFY, worker_id="verify-2"),
                pb.WorkerInfo(pool=pb.WORKER_POOL_DRAFT, worker_id="draft-1", draining=True),
            ],
            running_sessions=3,
            finished_sessions=40,
            completion_tokens=1234,
            speculation=types_pb2.SpeculationFigures(
                rounds=10, drafts=8, draft_tokens=32, accepted_tokens=16
            ),
            redis_reachable=False,
        )
        yield coordinator


def test_tables(fake: FakeCoordinator) -> None:
    result = CliRunner().invoke(
        main, ["status", "--coordinator", fake.address], env={"COLUMNS": "160"}
    )
    assert result.exit_code == 0
    rows = [line for line in result.stdout.splitlines() if "-1" in line or "-2" in line]
    assert [
        state in row for state, row in zip(["up", "not connected", "draining"], rows, strict=True)
    ] == [True] * 3
    assert "3 / 64" in rows[0]
    assert "bfloat16/invariant" in result.stdout
    assert "10.0.0.1:5001" in rows[0]
    assert "3 running, 40 finished, 1234 tokens" in result.stdout
    assert "acceptance rate 50%" in result.stdout
    assert "UNREACHABLE" in result.stdout


def test_json(fake: FakeCoordinator) -> None:
    result = CliRunner().invoke(main, ["status", "--json", "--coordinator", fake.address])
    found = json.loads(result.stdout)
    assert [worker["worker_id"] for worker in found["workers"]] == [
        "verify-1",
        "verify-2",
        "draft-1",
    ]
    assert found["workers"][0]["dtype"] == "bfloat16"
    assert found["workers"][0]["numerics"] == "invariant"
    assert found["running_sessions"] == 3
    assert found["redis_reachable"] is False
    assert found["speculation"]["acceptance_rate"] == 0.5
    assert found["speculation"]["mean_acceptance_length"] == 2.6
    assert found["models"][0]["name"] == "fake"
