"""A local stack of stand-ins: started, watched and ended as real processes with a real Valkey."""

import asyncio
import signal
import socket
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from outrider import AsyncClient
from outrider.errors import AddressInUseError, NotFoundError, UnavailableError
from outrider.local.commands import StackSettings
from outrider.local.ports import STEADY_PORTS, listens, take_port
from outrider.local.stack import LocalStack
from tests.support.fake_stack import FakeCommands

DEADLINE_S = 60


@pytest.fixture(autouse=True)
def _kept_logs_go_with_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def settings() -> StackSettings:
    return StackSettings(model="m", verify_workers=1, draft_workers=2, start_timeout_s=DEADLINE_S)


@pytest.fixture
def commands(settings: StackSettings, tmp_path: Path) -> FakeCommands:
    return FakeCommands(settings, tmp_path)


@pytest.fixture
async def stack(settings: StackSettings, commands: FakeCommands) -> AsyncIterator[LocalStack]:
    async with LocalStack(settings, commands=commands) as started:
        yield started


async def test_everything_is_ready_after_start(stack: LocalStack) -> None:
    assert list(stack.processes) == ["valkey", "coordinator", "verify-1", "draft-1", "draft-2"]
    assert all(child.running for child in stack.processes.values())
    assert await listens("127.0.0.1", int(stack.redis_url.split(":")[2].split("/")[0]))
    async with AsyncClient(stack.address) as client:
        assert (await client.complete("Hi")).text == "Hello w!"
    assert {path.name for path in stack.run_dir.glob("*.log")} >= {"coordinator.log", "draft-2.log"}


async def test_stop_ends_the_coordinator_first_and_leaves_nothing(
    settings: StackSettings, commands: FakeCommands, tmp_path: Path
) -> None:
    stack = LocalStack(settings, commands=commands)
    await stack.start()
    run_dir, port = stack.run_dir, int(stack.address.split(":")[1])
    await stack.stop()
    stopped = (tmp_path / "stopped").read_text().split()
    assert stopped[0] == "coordinator"
    assert sorted(stopped[1:]) == ["draft-1", "draft-2", "verify-1"]
    assert [c.exit_code for c in stack.processes.values()] == [0] * 5
    assert not run_dir.exists()
    assert not await listens("127.0.0.1", port)


async def test_a_worker_that_will_not_stop_is_killed(
    commands: FakeCommands, tmp_path: Path
) -> None:
    commands.kinds = {"draft-1": "stubborn"}
    settings = StackSettings(model="m", stop_grace_s=0.5, drain_s=0, start_timeout_s=DEADLINE_S)
    async with LocalStack(settings, commands=commands) as stack:
        pass
    assert stack.processes["draft-1"].exit_code == -signal.SIGKILL
    assert stack.processes["verify-1"].exit_code == 0


async def test_waiting_is_told(settings: StackSettings, commands: FakeCommands) -> None:
    told: list[str] = []
    async with LocalStack(settings, report=told.append, commands=commands):
        pass
    assert told[0] == "waiting for valkey"
    assert "waiting for coordinator, verify-1, draft-1, draft-2" in told
    assert len(set(told)) == len(told)


async def test_a_process_that_dies_while_starting_ends_the_start(
    settings: StackSettings, commands: FakeCommands
) -> None:
    commands.kinds = {"verify-1": "broken"}
    stack = LocalStack(settings, commands=commands)
    with pytest.raises(UnavailableError, match="verify-1") as caught:
        await stack.start()
    assert "exit code 3" in caught.value.message
    assert "the model has no weights" in caught.value.message
    assert not any(child.running for child in stack.processes.values())
    assert stack.processes["verify-1"].log_path.exists()


async def test_not_ready_in_time(tmp_path: Path) -> None:
    settings = StackSettings(model="m", start_timeout_s=1.0, stop_grace_s=0.2, drain_s=0)
    commands = FakeCommands(settings, tmp_path)
    commands.kinds = {"coordinator": "stubborn"}
    stack = LocalStack(settings, commands=commands)
    with pytest.raises(UnavailableError, match="not ready after 1 s"):
        await stack.start()
    assert not any(child.running for child in stack.processes.values())


async def test_cancelled_start_leaves_nothing(
    settings: StackSettings, commands: FakeCommands
) -> None:
    commands.kinds = {"verify-1": "stubborn", "coordinator": "stubborn"}
    waiting = asyncio.Event()

    def report(line: str) -> None:
        if "coordinator" in line:
            waiting.set()

    quick = StackSettings(model="m", stop_grace_s=0.2, drain_s=0)
    stack = LocalStack(quick, report=report, commands=commands)
    task = asyncio.create_task(stack.start())
    async with asyncio.timeout(DEADLINE_S):
        await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(stack.processes) == 4
    assert not any(child.running for child in stack.processes.values())


async def test_taken_port_is_found_before_anything_starts(commands: FakeCommands) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        stack = LocalStack(StackSettings(model="m", port=port), commands=commands)
        with pytest.raises(AddressInUseError, match=f"{port}.*--port"):
            await stack.start()
        assert stack.processes == {}


async def test_kill_add_and_deaths(stack: LocalStack) -> None:
    await stack.kill("draft-1")
    assert stack.processes["draft-1"].exit_code == -signal.SIGKILL
    assert await stack.add_draft_worker() == "draft-3"
    assert stack.processes["draft-3"].running
    with pytest.raises(NotFoundError, match="draft-9"):
        await stack.kill("draft-9")
    death = asyncio.create_task(stack.first_death())
    stack.processes["draft-2"]._process.kill()
    async with asyncio.timeout(DEADLINE_S):
        assert (await death).name == "draft-2"


async def test_given_redis_is_used(commands: FakeCommands) -> None:
    settings = StackSettings(model="m", redis_url="redis://elsewhere:6379/0", drafter="none")
    async with LocalStack(settings, commands=commands) as stack:
        assert list(stack.processes) == ["coordinator", "verify-1"]
        assert stack.redis_url == "redis://elsewhere:6379/0"


def test_take_port_gives_a_free_one() -> None:
    port = take_port("127.0.0.1", 0)
    assert port in STEADY_PORTS  # outgoing connections take none of these
    assert take_port("127.0.0.1", port) == port


def test_take_port_passes_over_one_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        free = take_port("127.0.0.1", 0)
        monkeypatch.setattr("outrider.local.ports.STEADY_PORTS", [taken] * 99 + [free])
        assert take_port("127.0.0.1", 0) == free
        monkeypatch.setattr("outrider.local.ports.STEADY_PORTS", [taken] * 100)
        with pytest.raises(AddressInUseError, match=str(taken)):
            take_port("127.0.0.1", 0)
