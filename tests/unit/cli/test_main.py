"""The command as a whole: help, services, names of commands."""

import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from click.testing import CliRunner

from outrider import __version__
from outrider.__main__ import main as entry
from outrider.cli import COMMANDS, main
from outrider.client import Client


def test_help_lists_every_command() -> None:
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    for name, (_, what) in COMMANDS.items():
        assert name in result.stdout
        assert what in result.stdout


def test_every_command_but_the_services_has_its_own_help() -> None:
    for name in COMMANDS:
        if COMMANDS[name][0].endswith("services"):
            continue
        result = CliRunner().invoke(main, [name, "--help"])
        assert result.exit_code == 0, name
        assert f"{name} [OPTIONS]" in result.stdout


def test_unknown_command_is_wrong_usage() -> None:
    result = CliRunner().invoke(main, ["generat"])
    assert result.exit_code == 2
    assert "generat" in result.stderr


def test_ctrl_c_is_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "status", interrupt)
    result = CliRunner().invoke(main, ["status"])
    assert (result.exit_code, result.stderr) == (130, "\ninterrupted\n")


# SIGINT comes just as the module in argv[1] is about to be imported.
INTERRUPTED_IMPORT = """
import os, runpy, signal, sys

wanted = sys.argv[1]

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == wanted:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder)
sys.argv[1:] = ["status"]
runpy.run_module("outrider", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    "module", ["outrider.cli", "click", "grpc", "outrider.errors", "outrider.cli.status"]
)
def test_ctrl_c_during_the_imports_is_no_traceback(module: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, module]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "\ninterrupted\n")


def test_the_installed_command_is_the_one_that_looks_after_ctrl_c() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    assert EntryPoint("outrider", project["scripts"]["outrider"], "").load() is entry


def test_version() -> None:
    assert __version__ in CliRunner().invoke(main, ["--version"]).stdout


def test_help_loads_no_subcommand() -> None:
    code = (
        "import sys\nfrom outrider.cli import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "print([m for m in sys.modules if m.startswith('outrider.cli.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_services_get_every_argument() -> None:
    command = [sys.executable, "-m", "outrider", "draft-worker"]
    helped = subprocess.run([*command, "--help"], capture_output=True, text=True, check=False)
    assert helped.returncode == 0
    assert "--ngram-max" in helped.stdout
    refused = subprocess.run(
        [*command, "--redis-url", "redis://x", "--bogus", "1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 2
    assert "--bogus" in refused.stderr
