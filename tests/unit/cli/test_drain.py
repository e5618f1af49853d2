"""`outrider drain`, and how every command finds a coordinator, against scripted ones."""

from collections.abc import Iterator
from itertools import count

import pytest
from click.testing import CliRunner, Result

from outrider.cli import drain, main
from outrider.pb.v1 import coordinator_pb2 as pb
from tests.support.fake_coordinator import SCRIPT, FakeCoordinator, serving_in_thread


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCoordinator]:
    monkeypatch.setattr(drain, "POLL_S", 0.01)
    with serving_in_thread(SCRIPT) as coordinator:
        yield coordinator


def outrider(fake: FakeCoordinator, *arguments: str, nobody: str = "127.0.0.1:1") -> Result:
    """Runs with two coordinators, the first of which is not there."""
    name, *others = arguments
    where = ["--coordinator", nobody, "--coordinator", fake.address]
    return CliRunner().invoke(main, [name, *where, *others])


def test_waits_until_no_session_is_left(fake: FakeCoordinator) -> None:
    fake.left = [3, 1, 0]
    result = outrider(fake, "drain", "verify-1")
    assert result.exit_code == 0
    assert "verify-1 has no sessions" in result.stdout
    assert fake.drains == [pb.DrainWorkerRequest(worker_id="verify-1", draining=True)] * 3


def test_sessions_that_stay_are_exit_code_1(fake: FakeCoordinator) -> None:
    fake.left = [2]
    result = outrider(fake, "drain", "verify-1", "--wait-s", "0")
    assert result.exit_code == 1
    assert "still has 2 sessions" in result.stderr
    assert len(fake.drains) == 1


@pytest.mark.parametrize("now", [(), ("another",)], ids=["gone", "started again"])
def test_one_that_has_gone_is_drained_and_one_started_again_is_let_be(
    fake: FakeCoordinator, now: tuple[str, ...]
) -> None:
    looks = count()

    async def status(request: object, context: object) -> pb.GetStatusResponse:
        incarnations = ("first",) if next(looks) < 2 else now
        workers = [pb.WorkerInfo(worker_id="verify-1", incarnation=name) for name in incarnations]
        return pb.GetStatusResponse(workers=workers)

    fake.get_status = status
    fake.left = [2]
    result = outrider(fake, "drain", "verify-1")
    assert result.exit_code == 0
    assert "verify-1 has no sessions" in result.stdout
    assert len(fake.drains) == 2


def test_undo(fake: FakeCoordinator) -> None:
    fake.left = [2]
    result = outrider(fake, "drain", "verify-1", "--undo")
    assert (result.exit_code, result.stdout) == (0, "verify-1 takes sessions again\n")
    assert fake.drains == [pb.DrainWorkerRequest(worker_id="verify-1", draining=False)]


def test_every_command_asks_the_coordinator_that_answers(fake: FakeCoordinator) -> None:
    assert outrider(fake, "status").exit_code == 0
    result = outrider(fake, "generate", "Hi", "--tenant", "acme", "--previous-session-id", "before")
    assert result.stdout == "Hello w!\n"
    assert fake.requests[0].previous_session_id == "before"
    assert fake.metadata[0]["outrider-tenant"] == "acme"


def test_nobody_answers() -> None:
    result = CliRunner().invoke(main, ["drain", "--coordinator", "127.0.0.1:1", "verify-1"])
    assert result.exit_code == 1
    assert "outrider up" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["drain"], 2, "WORKER"),
        (["drain", ""], 2, "outrider status"),
        (["drain", "--coordinator", "here", "verify-1"], 1, "HOST:PORT"),
        (["status", "--tenant", "\n"], 1, "tenant"),
    ],
)
def test_wrong_usage(arguments: list[str], code: int, named: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == code
    assert named in result.stderr
