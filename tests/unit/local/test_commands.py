"""The command lines fit what the services take, and settings that do not fit are refused."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

import draft_worker.config
from outrider.errors import ConfigError
from outrider.local.commands import (
    DRAFTERS,
    RUNNING_A_MODEL,
    WITH_DRAFT_MODEL,
    Commands,
    StackSettings,
)
from tests.support.draft_networks import save_draft_network
from tests.support.models import save_model


def test_drafter_and_draft_model_have_to_fit() -> None:
    with pytest.raises(ConfigError, match="needs a draft model"):
        StackSettings(model="m", drafter="model")
    with pytest.raises(ConfigError, match="'hybrid' needs a draft model"):
        StackSettings(model="m", drafter="hybrid")
    for drafter in ("ngram", "suffix", "early-exit"):
        with pytest.raises(ConfigError, match="of no use"):
            StackSettings(model="m", drafter=drafter, draft_model="d")
    with pytest.raises(ConfigError, match="ngram, suffix, model, early-exit, hybrid, none"):
        StackSettings(model="m", drafter="magic")
    with pytest.raises(ConfigError, match="fast, invariant"):
        StackSettings(model="m", numerics="exact")
    with pytest.raises(ConfigError, match="verify worker"):
        StackSettings(model="m", verify_workers=0)


def test_cores_are_shared_by_the_processes_that_run_a_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    assert StackSettings(model="m").model_threads == 12
    pair = StackSettings(
        model="m", drafter="model", draft_model="d", draft_workers=2, verify_workers=2
    )
    assert pair.model_threads == 3
    assert StackSettings(model="m", verify_workers=50).model_threads == 1
    assert StackSettings(model="m", threads=5, verify_workers=50).model_threads == 5


def flags(command: list[str]) -> dict[str, str]:
    assert command[:2] == [sys.executable, "-m"]
    return dict(zip(command[3::2], command[4::2], strict=True))


def test_flags_of_each_service() -> None:
    settings = StackSettings(
        model="m",
        drafter="model",
        draft_model="d",
        threads=2,
        k="fixed:5",
        drain_s=2.0,
        otlp_endpoint="http://c:4317",
        verify_flags=("--kv-memory", "64MiB"),
    )
    commands = Commands(settings)
    shared = {
        "--redis-url": "redis://r",
        "--log-level": "info",
        "--otlp-endpoint": "http://c:4317",
    }
    coordinator = commands.coordinator("redis://r", 7)
    assert coordinator[2] == "coordinator"
    assert flags(coordinator) == shared | {
        "--model": "m",
        "--host": "127.0.0.1",
        "--port": "7",
        "--drain-timeout-s": "2.0",
    }
    verify = commands.verify_worker("redis://r", "verify-1")
    assert verify[2] == "verify_worker"
    assert flags(verify) == shared | {
        "--worker-id": "verify-1",
        "--model": "m",
        "--k": "fixed:5",
        "--drain-timeout-s": "2.0",
        "--threads": "2",
        # The last one counts.
        "--kv-memory": "64MiB",
    }
    draft = commands.draft_worker("redis://r", "draft-1")
    assert draft[2] == "draft_worker"
    assert flags(draft) == shared | {
        "--worker-id": "draft-1",
        "--drafter": "model",
        "--drain-timeout-s": "2.0",
        "--draft-model": "d",
        "--target": "m",
        "--threads": "2",
    }


def test_numerics_and_trust_are_passed_on_where_they_are_not_the_default() -> None:
    commands = Commands(StackSettings(model="m", numerics="invariant", trust_drafts=True))
    assert flags(commands.verify_worker("r", "v"))["--numerics"] == "invariant"
    assert flags(commands.coordinator("r", 7))["--trust-draft-worker"] == "all"
    plain = Commands(StackSettings(model="m"))
    assert "--numerics" not in plain.verify_worker("r", "v")
    assert "--trust-draft-worker" not in plain.coordinator("r", 7)


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_lookup_needs_no_model(drafter: str) -> None:
    settings = StackSettings(model="m", drafter=drafter)
    command = Commands(settings).draft_worker("redis://r", "draft-1")
    assert "--draft-model" not in command
    assert "--target" not in command


def test_the_target_drafts_for_itself_with_its_first_layers() -> None:
    settings = StackSettings(model="m", drafter="early-exit", threads=3)
    draft = flags(Commands(settings).draft_worker("redis://r", "draft-1"))
    assert draft["--drafter"] == "early-exit"
    assert draft["--target"] == "m"
    assert draft["--threads"] == "3"
    assert "--draft-model" not in draft


def test_what_the_stack_takes_the_draft_worker_takes() -> None:
    assert set(DRAFTERS) - {"none"} == set(draft_worker.config.DRAFTERS)
    assert set(WITH_DRAFT_MODEL) == set(draft_worker.config.WITH_DRAFT_MODEL)
    assert set(RUNNING_A_MODEL) == set(draft_worker.config.RUNNING_A_MODEL)


def test_valkey_keeps_nothing_and_throws_nothing_out(tmp_path: Path) -> None:
    command = Commands(StackSettings(model="m")).valkey(6379, tmp_path)
    assert Path(command[0]).is_file()
    pairs = dict(zip(command[1::2], command[2::2], strict=True))
    assert pairs["--bind"] == "127.0.0.1"
    assert pairs["--save"] == ""
    assert pairs["--maxmemory-policy"] == "noeviction"


def test_a_drafter_that_was_trained_for_its_target_leaves_it_the_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    trained = save_draft_network(tmp_path / "draft", save_model(tmp_path / "target"))
    settings = StackSettings(model="m", drafter="hybrid", draft_model=str(trained))
    assert settings.model_threads == 12
    assert replace(settings, threads=3).model_threads == 3
    assert replace(settings, draft_model=str(tmp_path / "target")).model_threads == 6


def test_tls_tokens_and_how_redis_is_reached_go_to_every_service(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--redis-url"):
        StackSettings(model="m", redis_flags=("--redis-ca", "ca"))
    settings = StackSettings(
        model="m", redis_url="rediss://r", redis_flags=("--redis-ca", "ca"), tls_dir=tmp_path
    )
    commands = Commands(settings)
    made = {
        "coordinator": commands.coordinator("rediss://r", 1),
        "verify-worker": commands.verify_worker("rediss://r", "v"),
        "draft-worker": commands.draft_worker("rediss://r", "d"),
    }
    for part, command in made.items():
        found = flags(command)
        assert found["--redis-ca"] == "ca"
        assert found["--tls-ca"] == str(tmp_path / "ca.crt")
        assert found["--tls-cert"] == str(tmp_path / f"{part}.crt")
        assert found["--tls-key"] == str(tmp_path / f"{part}.key")
    with_tokens = commands.coordinator("rediss://r", 1, "one", "two")
    assert [word for at, word in enumerate(with_tokens) if with_tokens[at - 1] == "--tokens"] == [
        "one",
        "two",
    ]
