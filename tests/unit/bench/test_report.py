"""What a benchmark prints ends with its figures, and a bar that is not met is an exit code."""

import json

import pytest

from bench.report import Bar, Report


def test_the_last_line_is_json_and_a_part_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("T", ["what", "value"], [["x", 1.23456]], {"x": 1.5}, [Bar("b", False, "why")])
    report.show()
    part = capsys.readouterr().out
    assert "1.23" in part
    assert "NOT met" in part
    assert "{" not in part
    report.print()
    last = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(last) == {"figures": {"x": 1.5}, "bars": {"b": False}}


def test_only_an_enforced_bar_that_is_not_met_exits() -> None:
    report = Report("T", ["what"], bars=[Bar("a", True), Bar("b", False)])
    report.exit(enforce=False)
    with pytest.raises(SystemExit) as exited:
        report.exit(enforce=True)
    assert exited.value.code == 1
    Report("T", ["what"], bars=[Bar("a", True)]).exit(enforce=True)
