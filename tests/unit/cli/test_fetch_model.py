"""`outrider fetch-model` and the names that `--model` knows."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from outrider.cli import main, models
from outrider.cli.models import resolve_model
from outrider.errors import ConfigError, UnavailableError
from outrider.model.embedded import EMBEDDED_MODEL, FILES, Progress, model_dir


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    directory = model_dir(tmp_path)
    directory.mkdir(parents=True)
    for name in FILES:
        (directory / name).touch()
    return tmp_path


def test_cached_model_is_printed_and_nothing_is_fetched(filled: Path) -> None:
    result = CliRunner().invoke(main, ["fetch-model"], env={"OUTRIDER_CACHE": str(filled)})
    assert result.exit_code == 0
    assert result.stdout == f"{model_dir(filled)}\n"
    assert result.stderr == ""


def test_progress_goes_to_stderr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(cache_dir: Path, progress: Progress) -> Path:
        progress("downloading", 0.0)
        progress("done", 1.0)
        return model_dir(cache_dir)

    monkeypatch.setattr(models, "ensure_embedded_model", fetch)
    result = CliRunner().invoke(main, ["fetch-model", "--cache", str(tmp_path)])
    assert result.stdout == f"{model_dir(tmp_path)}\n"
    assert f"{EMBEDDED_MODEL}: done" in result.stderr


def test_no_network_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(cache_dir: Path, progress: Progress) -> Path:
        raise UnavailableError("can't download the embedded model")

    monkeypatch.setattr(models, "ensure_embedded_model", fetch)
    result = CliRunner().invoke(main, ["fetch-model", "--cache", str(tmp_path)])
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == "outrider: can't download the embedded model"


def test_names_of_models(filled: Path) -> None:
    assert resolve_model(EMBEDDED_MODEL, str(filled)) == str(model_dir(filled))
    assert resolve_model(str(filled), "/nowhere") == str(filled)
    with pytest.raises(ConfigError, match=EMBEDDED_MODEL):
        resolve_model("another-model", str(filled))
