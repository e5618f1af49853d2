"""Settings from flags and environment; what is unknown or wrong is refused by name."""

from dataclasses import dataclass

import pytest
from click.testing import CliRunner, Result

from outrider.config import child_environment, command, setting
from outrider.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Settings:
    path: str = setting(help="A path.")
    draft_len: int = setting(4, at_least=0, at_most=16, help="A length.")
    share: float = setting(0.5, at_least=0, at_most=1, help="A share.")
    drafter: str = setting("ngram", choices=("ngram", "model"), help="A choice.")
    endpoint: str | None = setting(None, help="An address.")
    seed: int | None = setting(None, at_least=0, help="A number or nothing.")
    color: bool = setting(True, help="A switch.")
    stop: tuple[str, ...] = setting((), many=True, help="Several.")

    def __post_init__(self) -> None:
        if self.drafter == "model" and self.draft_len == 0:
            raise ConfigError("the drafter 'model' needs a draft length")


def invoke(*arguments: str, env: dict[str, str] | None = None) -> tuple[Result, list[Settings]]:
    seen: list[Settings] = []
    made = command(Settings, seen.append, name="test")
    return CliRunner().invoke(made, arguments, env=env), seen


def test_defaults() -> None:
    result, seen = invoke("--path", "here")
    assert result.exit_code == 0, result.output
    assert seen == [Settings("here")]
    assert (seen[0].endpoint, seen[0].seed, seen[0].stop, seen[0].color) == (None, None, (), True)


def test_flags_of_every_kind() -> None:
    flags = "--path p --draft-len 16 --share 1 --drafter model --endpoint e --seed 0 --no-color"
    _, seen = invoke(*flags.split(), "--stop", "a", "--stop", "b c")
    assert seen == [Settings("p", 16, 1.0, "model", "e", 0, False, ("a", "b c"))]


def test_environment_is_read_and_flags_win() -> None:
    env = {"OUTRIDER_PATH": "env", "OUTRIDER_DRAFT_LEN": "2", "OUTRIDER_COLOR": "0"}
    _, seen = invoke("--draft-len", "3", env=env)
    assert seen == [Settings("env", 3, color=False)]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--path"),
        (["--path", "p", "--draft-length", "3"], "--draft-length"),
        (["--path", "p", "extra"], "extra"),
        (["--path", "p", "--draft-len", "17"], "--draft-len"),
        (["--path", "p", "--draft-len", "-1"], "--draft-len"),
        (["--path", "p", "--draft-len", "two"], "--draft-len"),
        (["--path", "p", "--share", "1.5"], "--share"),
        (["--path", "p", "--drafter", "magic"], "--drafter"),
        (["--path", "p", "--seed", "-1"], "--seed"),
        (["--path", "p", "--drafter", "model", "--draft-len", "0"], "needs a draft length"),
    ],
)
def test_wrong_flags_are_refused_by_name(arguments: list[str], named: str) -> None:
    result, seen = invoke(*arguments)
    assert result.exit_code == 2
    assert named in result.output
    assert seen == []


def test_wrong_environment_is_refused_by_name() -> None:
    result, seen = invoke("--path", "p", env={"OUTRIDER_DRAFT_LEN": "many"})
    assert result.exit_code == 2
    assert "--draft-len" in result.output
    assert seen == []


def test_nan_is_no_number_within_bounds() -> None:
    result, seen = invoke("--path", "p", "--share", "nan")
    assert result.exit_code == 2
    assert seen == []


def test_help_names_flag_variable_default_and_bounds() -> None:
    result, _ = invoke("--help")
    words = " ".join(result.output.split())
    assert "--draft-len" in words
    assert "OUTRIDER_DRAFT_LEN" in words
    assert "0<=x<=16" in words


def test_a_child_does_not_inherit_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_PORT", "7070")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    environment = child_environment()
    assert "OUTRIDER_PORT" not in environment
    assert environment["OMP_NUM_THREADS"] == "1"
