"""The public verifier on real systems: a right one passes, wrong ones are found out."""

import json
import tempfile
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from bench.wrong_worker import WrongCommands
from outrider.cli import main
from outrider.cli.verify_exactness import Settings, verify
from outrider.exactness.checks import Check
from tests.support.models import perturbed, save_model

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def drafter(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return perturbed(target, tmp_path_factory.mktemp("drafter"), noise=0.3)


def test_a_right_pair_passes_and_nothing_is_left_running(
    target: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(psutil.Process().children(recursive=True))
    arguments = ["--target", str(target), "--drafter", str(drafter), "--threads", "1"]
    arguments += ["--samples", "400", "--top-k", "6", "--rule", "rejection", "--json"]
    result = CliRunner().invoke(main, ["verify-exactness", *arguments, "--new-tokens", "12"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    figures = {check["name"]: check["figures"] for check in answer["checks"]}
    assert answer["passed"]
    assert [name for name in figures if "parity" in name] == [
        "greedy parity, speculation off",
        "greedy parity, speculation on",
        "seeded parity, alone",
        "seeded parity, 8 at once",
    ]
    for rule in ("coupled", "rejection"):
        found = figures[f"distribution, rule {rule}"]
        assert found["samples"] == 400
        assert found["classes"] > 10
        assert found["draft_tokens"] >= 400
        # A drafter that is often wrong, so that every part of the rule is at work.
        assert 0.05 < found["acceptance_rate"] < 0.9
    assert set(psutil.Process().children(recursive=True)) <= before
    assert list(tmp_path.glob("outrider-*")) == []


def test_ngram_and_a_file_of_prompts(target: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text("abcabcabcabc\nxyxyxyxy\n")
    arguments = ["--target", str(target), "--prompts", str(prompts), "--threads", "1"]
    arguments += ["--samples", "200", "--top-k", "4", "--new-tokens", "24"]
    result = CliRunner().invoke(main, ["verify-exactness", *arguments])
    assert result.exit_code == 0, result.output
    assert "2 of 2 answers" in result.stdout


async def found_in(target: Path, drafter: Path, fault: str) -> dict[str, Check]:
    settings = Settings(
        target=str(target),
        drafter=str(drafter),
        samples=400,
        top_k=8,
        rule="rejection",
        new_tokens=12,
        threads=1,
    )
    checks: list[Check] = []
    await verify(settings, checks, lambda stack: WrongCommands(stack, fault))
    return {check.name: check for check in checks}


async def test_accepting_every_draft_is_found(target: Path, drafter: Path) -> None:
    checks = await found_in(target, drafter, "always-accept")
    failed = {name for name, check in checks.items() if not check.passed}
    assert failed == {
        "greedy parity, speculation on",
        "seeded parity, alone",
        "seeded parity, 8 at once",
        "distribution, rule coupled",
    }
    assert checks["greedy parity, speculation on"].figures["first"]["margin"] > 1e-3


@pytest.mark.parametrize("fault", ["softmax-residual", "untruncated-q"])
async def test_a_wrong_rejection_rule_is_found(target: Path, drafter: Path, fault: str) -> None:
    checks = await found_in(target, drafter, fault)
    failed = {name for name, check in checks.items() if not check.passed}
    assert failed == {"distribution, rule rejection"}
