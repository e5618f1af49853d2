"""`outrider up` and `outrider demo` over stand-ins, and what they refuse before they start."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner, Result

from outrider.cli import main
from outrider.cli import up as up_module
from outrider.errors import UnavailableError
from outrider.local import stack as stack_module
from outrider.local.commands import StackSettings
from tests.support.certificates import Authority, write_all
from tests.support.draft_networks import save_draft_network
from tests.support.fake_stack import FakeCommands
from tests.support.models import save_model
from tests.support.valkey import new_valkey

DEADLINE_S = 60


@pytest.fixture(autouse=True)
def _kept_logs_go_with_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


def up(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["up", "--port", "0", *arguments])


def test_unknown_model_is_refused(tmp_path: Path) -> None:
    result = up("--model", str(tmp_path / "nowhere"))
    assert result.exit_code == 1
    assert result.stderr.startswith("outrider: no model at ")
    assert "nowhere" in result.stderr


def test_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    result = up("--model", str(tmp_path))
    assert result.exit_code == 1
    assert str(tmp_path) in result.stderr


def test_wrong_tokenizer_pair_is_refused(model: Path, tmp_path: Path) -> None:
    drafter = save_model(tmp_path / "drafter")
    tokenizer = drafter / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<eos>", "<end>"))
    result = up("--model", str(model), "--drafter", "model", "--draft-model", str(drafter))
    assert result.exit_code == 1
    assert "id 256 is '<eos>'" in result.stderr
    assert "'<end>'" in result.stderr


def test_taken_port_is_refused(model: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        result = CliRunner().invoke(main, ["up", "--port", port, "--model", str(model)])
    assert result.exit_code == 1
    assert port in result.stderr
    assert "--port" in result.stderr


def test_a_redis_that_does_not_answer_is_refused_before_anything_starts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = use_stand_ins(monkeypatch, tmp_path, {})
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        result = up("--model", str(model), "--redis-url", f"redis://{address}/0")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("outrider: Redis does not answer: ")
    assert address in line
    assert "--redis-url" in line
    assert made == []
    result = up("--model", str(model), "--redis-url", "http://127.0.0.1:1")
    assert (result.exit_code, made) == (1, [])
    assert "is not a Redis address" in result.stderr


def test_a_redis_that_answers_is_used(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[StackSettings] = []

    class NothingToStart:
        def __init__(self, settings: StackSettings, **_: object) -> None:
            started.append(settings)
            raise UnavailableError("no stack in this test")

    monkeypatch.setattr(up_module, "LocalStack", NothingToStart)
    with new_valkey() as valkey:
        result = up("--model", str(model), "--redis-url", valkey.connection_url)
        assert "no stack in this test" in result.stderr
        assert [settings.redis_url for settings in started] == [valkey.connection_url]


def test_certificates_and_tokens_are_looked_at_before_anything_starts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = use_stand_ins(monkeypatch, tmp_path, {})
    directory = write_all(tmp_path, Authority())
    (directory / "tokens").write_text("rubbish\n")
    tokens = up("--model", str(model), "--tls", str(directory), "--tokens", f"{directory}/tokens")
    assert tokens.exit_code == 1
    assert "line 1" in tokens.stderr
    (directory / "draft-worker.key").unlink()
    certificates = up("--model", str(model), "--tls", str(directory))
    assert certificates.exit_code == 1
    assert "draft-worker.key" in certificates.stderr
    assert made == []


def test_flags_that_do_not_fit_are_wrong_usage() -> None:
    assert up("--model", "x", "--drafter", "model").exit_code == 2
    assert up("--model", "x", "--drafter", "hybrid").exit_code == 2
    assert up("--drafter", "suffix", "--draft-model", "x").exit_code == 2
    assert up("--drafter", "magic").exit_code == 2
    assert up("--verify-workers", "0").exit_code == 2
    assert up("--numerics", "exact").exit_code == 2


def use_stand_ins(
    monkeypatch: pytest.MonkeyPatch, directory: Path, kinds: dict[str, str]
) -> list[FakeCommands]:
    made: list[FakeCommands] = []

    def commands(settings: StackSettings) -> FakeCommands:
        made.append(FakeCommands(settings, directory))
        made[-1].kinds = kinds
        return made[-1]

    monkeypatch.setattr(stack_module, "Commands", commands)
    return made


def demo(model: Path) -> Result:
    return CliRunner().invoke(main, ["demo", "--model", str(model)], env={"COLUMNS": "120"})


def test_demo_shows_both_runs_and_that_they_are_equal(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_stand_ins(monkeypatch, tmp_path, {})
    result = demo(model)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("Hello w!") == 2
    assert "both texts are equal" in result.stdout
    assert "25.0%" in result.stdout
    assert "1.33" in result.stdout
    stopped = (tmp_path / "stopped").read_text().split()
    assert sorted(stopped) == ["coordinator", "draft-1", "verify-1"]


def test_demo_fails_when_the_texts_differ(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_stand_ins(monkeypatch, tmp_path, {"coordinator": "inexact"})
    result = demo(model)
    assert result.exit_code == 1
    assert "the texts differ, first at token 0" in result.stderr
    assert (tmp_path / "stopped").read_text().startswith("coordinator")


def test_up_passes_numerics_and_trust_on(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[StackSettings] = []

    class NothingToStart:
        def __init__(self, settings: StackSettings, **_: object) -> None:
            started.append(settings)
            raise UnavailableError("no stack in this test")

    monkeypatch.setattr(up_module, "LocalStack", NothingToStart)
    assert up("--model", str(model), "--numerics", "invariant", "--trust-drafts").exit_code == 1
    assert up("--model", str(model)).exit_code == 1
    assert [(s.numerics, s.trust_drafts) for s in started] == [("invariant", True), ("fast", False)]


RUN_UP = """
import sys
import tempfile
from pathlib import Path
from outrider.cli import main
from outrider.local import stack
from tests.support.draft_networks import save_draft_network
from tests.support.certificates import Authority, write_all
from tests.support.fake_stack import FakeCommands

stack.Commands = lambda settings: FakeCommands(settings, Path(sys.argv[1]))
main(sys.argv[2:])
"""


def start_up(model: Path, directory: Path) -> subprocess.Popen[str]:
    arguments = ["up", "--model", str(model), "--port", "0"]
    return subprocess.Popen(
        [sys.executable, "-c", RUN_UP, str(directory), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_runs_until_a_signal_and_leaves_nothing(
    model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    process = start_up(model, tmp_path)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready at 127.0.0.1:")
        children = psutil.Process(process.pid).children()
        assert len(children) == 4
        os.kill(process.pid, number)
        _, errors = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0
    assert errors.splitlines()[-1] == "stopped"
    assert [child for child in children if child.is_running()] == []
    assert (tmp_path / "stopped").read_text().splitlines()[0] == "coordinator"


def test_up_ends_when_the_coordinator_dies(model: Path, tmp_path: Path) -> None:
    process = start_up(model, tmp_path)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready at ")
        for child in psutil.Process(process.pid).children():
            command = child.cmdline()
            if "draft-1" in command:
                child.kill()
            if "coordinator" in command:
                coordinator = child
        assert process.stderr is not None
        for line in process.stderr:
            if "draft-1 ended with exit code -9" in line:
                break
        coordinator.kill()
        _, errors = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 1
    assert "coordinator ended with exit code -9" in errors
    assert "Traceback" not in errors


def test_a_drafter_that_was_trained_for_another_target_is_refused(
    model: Path, tmp_path: Path
) -> None:
    other = save_model(tmp_path / "other", seed=9)
    draft = save_draft_network(tmp_path / "draft", other)
    config = json.loads((draft / "config.json").read_text())
    config["outrider_draft"]["target_layers"] = 4
    (draft / "config.json").write_text(json.dumps(config))
    result = up("--model", str(model), "--drafter", "model", "--draft-model", str(draft))
    assert result.exit_code == 1
    assert "trained for other" in result.stderr
    assert "the target is tiny" in result.stderr
