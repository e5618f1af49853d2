"""The benchmarks of the verify engine that need no peer, on a tiny model."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import batch, gguf, overhead, prefix, single, stall, trees, verify_curve
from bench.__main__ import NAMES, Benchmarks
from bench.engine import PHASES
from outrider.errors import ConfigError
from tests.support.models import save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("model")))


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    printed: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return printed


def test_every_name_is_a_command() -> None:
    benchmarks = Benchmarks(name="bench")
    for name in NAMES:
        found = benchmarks.get_command(None, name)  # type: ignore[arg-type]  # it needs none
        assert found is not None
        assert found.name == name


def test_single(model: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(single, "MEMORY_BYTES", 1 << 20)
    settings = single.Settings(
        model=model, rounds=2, new_tokens=4, threads=1, without=("vllm",), bar=True
    )
    with pytest.raises(SystemExit):  # without vLLM its bar is not met
        single.run(settings)
    printed = said(capsys)
    assert printed["figures"]["transformers"]["same_texts"] == 2
    assert printed["figures"]["Outrider"]["tokens_per_s"]["count"] == 2
    assert printed["figures"]["limit"]["reached"] > 0
    assert len(printed["bars"]) == 2


def test_batch(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    batch.run(batch.Settings(model=model, rounds=1, new_tokens=3, threads=1, without=("vllm",)))
    assert said(capsys)["figures"]["Outrider"]["texts"] == 8


def test_verify_curve(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = verify_curve.Settings(
        model=model, rows=(8, 1, 2), context=20, rounds=2, threads=1, bar=False
    )
    verify_curve.run(settings)
    figures = said(capsys)["figures"]
    for side in ("Outrider", "transformers"):
        assert list(figures[side]) == ["1", "2", "8"]
        assert figures[side]["1"]["over_first"]["median"] == 1.0


def test_trees(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    trees.run(trees.Settings(model=model, nodes=(5,), context=20, rounds=2, threads=1))
    figures = said(capsys)["figures"]
    assert figures["5"]["over_one_row"]["count"] == 2


def test_a_tree_is_filled_level_by_level() -> None:
    draft = trees.tree((1, 2, 3, 4, 5, 6, 7), 2)
    assert draft.parents == (-1, -1, 0, 0, 1, 1, 2)
    assert draft.depths == (1, 1, 2, 2, 2, 2, 3)


def test_prefix(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = prefix.Settings(model=model, prompt_tokens=100, new_tokens=4, rounds=2, threads=1)
    prefix.run(settings)
    printed = said(capsys)
    assert printed["figures"]["same_texts"] == printed["figures"]["rounds"] == 2
    assert printed["figures"]["first_s"]["median"] > 0


def test_stall(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = stall.Settings(model=model, prompt_tokens=120, alone_tokens=3, rounds=2, threads=1)
    stall.run(settings)
    figures = said(capsys)["figures"]
    for way in (stall.CHUNKED, stall.UNCHUNKED):
        assert figures[way]["beside_s"]["count"] == 2
        assert min(figures[way]["first_token_s"]["median"], figures[way]["beside_s"]["low"]) > 0


def test_overhead(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = overhead.Settings(
        model=model,
        sessions=(1, 8),
        steps=3,
        rounds=2,
        threads=1,
        services=False,
        profile=True,
    )
    overhead.run(settings)
    out = capsys.readouterr().out
    assert "aten::" in out
    assert "tottime" in out
    figures = json.loads(out.splitlines()[-1])["figures"]
    assert 0 < figures["8"]["outside_share"]["median"] < 1
    assert set(figures["1"]["phases_s"]) == set(PHASES)


def test_other_than_the_embedded_gguf_must_be_one(tmp_path: Path, model: str) -> None:
    with pytest.raises(ConfigError, match=r"no \.gguf file"):
        gguf.gguf_file(gguf.Settings(model=model, cache=str(tmp_path)))
