"""`outrider policy` against a real Valkey."""

import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from outrider.cli import main
from tests.support.valkey import new_valkey


@pytest.fixture
def url() -> Iterator[str]:
    with new_valkey() as server:
        yield server.connection_url


def policy(url: str, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["policy", "--redis-url", url, *arguments])


def test_shows_and_sets(url: str) -> None:
    shown = policy(url)
    assert shown.exit_code == 0
    assert shown.stdout == "rule coupled, speculation on, k worker (never set: the defaults)\n"
    assert policy(url, "--rule", "rejection").stdout == (
        "rule rejection, speculation on, k worker (version 1)\n"
    )
    assert policy(url, "--speculation", "off").stdout == (
        "rule rejection, speculation off, k worker (version 2)\n"
    )
    assert policy(url).stdout == "rule rejection, speculation off, k worker (version 2)\n"
    both = policy(url, "--rule", "coupled", "--speculation", "on", "--json")
    expected = {"version": 3, "rule": "coupled", "speculation": "on", "k": "worker"}
    assert json.loads(both.stdout) == expected
    for k in ("auto", "fixed:3", "worker"):
        assert f"k {k} (version" in policy(url, "--k", k).stdout


def test_what_is_refused(url: str) -> None:
    assert policy(url, "--rule", "magic").exit_code == 2
    assert policy(url, "--k", "3").exit_code == 2
    assert CliRunner().invoke(main, ["policy"]).exit_code == 2
    nobody = policy("redis://127.0.0.1:1/0")
    assert nobody.exit_code == 1
    assert "Redis does not answer" in nobody.stderr


def test_what_generate_takes_from_the_environment_sets_no_policy(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_RULE", "rejection")
    monkeypatch.setenv("OUTRIDER_SPECULATION", "off")
    assert (
        policy(url).stdout == "rule coupled, speculation on, k worker (never set: the defaults)\n"
    )
