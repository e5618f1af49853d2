"""`outrider verify-exactness`: what it asks for, what it prints, how it ends."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from outrider.cli import main, verify_exactness
from outrider.exactness.checks import Check
from outrider.exactness.verifier import Plan
from outrider.messages import AcceptanceRule
from tests.support.models import save_model

GOOD = Check("seeded parity", True, "8 of 8 answers equal", {"mismatches": 0})
BAD = Check("distribution", False, "p-value 1e-09", {"p_value": 1e-9})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


def verify(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["verify-exactness", *arguments])


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """No system is started; two checks are found, of which the second may fail."""
    seen: list[Plan] = []

    async def examine(plan: Plan, expected: Any, watcher: Any, found: Any, commands: Any) -> None:
        seen.append(plan)
        watcher.begin("examining", 2)
        found(GOOD)
        watcher.advance(1)
        found(BAD if plan.seed else GOOD)

    monkeypatch.setattr(verify_exactness, "prepare", lambda plan, watcher: None)
    monkeypatch.setattr(verify_exactness, "examine", examine)
    return seen


def test_a_table_and_exit_code_0(model: Path, plans: list[Plan]) -> None:
    result = verify("--target", str(model))
    assert result.exit_code == 0
    assert "seeded parity" in result.stdout
    assert "FAIL" not in result.stdout
    assert "examining" in result.stderr
    (plan,) = plans
    assert (plan.target, plan.drafter) == (str(model), "ngram")
    assert list(plan.rules) == [AcceptanceRule.COUPLED]


def test_a_failure_is_shown_and_exits_with_1(model: Path, plans: list[Plan]) -> None:
    result = verify("--target", str(model), "--seed", "1")
    assert result.exit_code == 1
    assert "FAIL" in result.stdout
    assert "1e-09" in result.stdout


def test_json_is_one_object(model: Path, plans: list[Plan]) -> None:
    result = verify("--target", str(model), "--json", "--seed", "1", "--rule", "rejection")
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert answer["passed"] is False
    assert answer["checks"][2] == {
        "name": "distribution",
        "passed": False,
        "summary": "p-value 1e-09",
        "figures": {"p_value": 1e-9},
    }
    assert list(plans[0].rules) == [AcceptanceRule.COUPLED, AcceptanceRule.REJECTION]


def test_case_23_another_tokenizer_fails_before_anything_is_started(
    model: Path, plans: list[Plan], tmp_path: Path
) -> None:
    drafter = save_model(tmp_path / "drafter")
    tokenizer = drafter / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<eos>", "<end>"))
    result = verify("--target", str(model), "--drafter", str(drafter), "--json")
    assert result.exit_code == 1
    (check,) = json.loads(result.stdout)["checks"]
    assert "id 256 is '<eos>'" in check["summary"]
    assert plans == []


def test_what_can_not_be_checked_is_refused(model: Path, tmp_path: Path) -> None:
    result = verify("--target", str(tmp_path / "nowhere"))
    assert result.exit_code == 1
    assert "no model at" in result.stderr
    assert verify("--target", str(model), "--drafter", "x").exit_code == 1
    assert verify("--target", str(model), "--prompts", str(tmp_path / "x")).exit_code == 1
    assert verify("--rule", "greedy").exit_code == 2
    assert verify("--temperature", "0").exit_code == 2
