"""Speculation over none, prompt by prompt: bars from made-up turns, and transformers beside it."""

from pathlib import Path
from typing import Any

import pytest

from bench.assisted import ASSISTED, LOOKUP, PLAIN, Generation, why_not
from bench.end_to_end import OFF, Settings, peers_report, report_of
from bench.turns import Turn
from outrider.draft_length import AUTO
from outrider.errors import ConfigError
from tests.support.models import perturbed, plain_greedy, save_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def drafter(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return perturbed(target, tmp_path_factory.mktemp("drafter"), noise=0.02)


def turns(*seconds: float) -> list[Turn]:
    return [Turn((n, n), taken) for n, taken in enumerate(seconds)]


def met(auto: list[Turn], **settings: Any) -> list[bool]:
    results = {OFF: turns(2.0, 2.0, 2.0), AUTO: auto}
    return [bar.met for bar in report_of(results, ["a", "a", "b"], Settings(**settings)).bars]


def test_bars() -> None:
    # Over all, no category below, and the same texts.
    assert met(turns(1.0, 1.0, 2.0)) == [True, True, True]
    assert met(turns(1.5, 1.5, 1.0)) == [False, True, True]
    assert met(turns(1.0, 1.0, 2.1)) == [True, False, True]
    assert met(turns(1.0, 1.0, 1.0), least=2.1) == [False, True, True]
    other = [*turns(1.0, 1.0), Turn((9, 9), 1.0)]
    assert met(other) == [True, True, False]
    results = {OFF: turns(2.0, 2.0, 2.0), AUTO: turns(2.1, 2.1, 1.0)}
    report = report_of(results, ["slow", "slow", "quick"], Settings())
    assert report.bars[1].detail == "slow 0.952x"
    # A random drafter may cost a little, in any category.
    assert met(turns(2.05, 2.05, 2.5), drafter="random") == [True, True]
    assert met(turns(2.1, 2.1, 1.0), drafter="random") == [False, True]


def test_what_differs_is_named() -> None:
    results = {OFF: turns(1.0, 1.0), AUTO: [*turns(1.0), Turn((1, 7), 1.0)]}
    report = report_of(results, ["a", "b"], Settings())
    assert report.figures["differences"] == [{"prompt": 1, "at": 1, "token_ids": [7, 1]}]
    assert [report.figures[name]["same_texts"] for name in ("a", "b", "all")] == [1, 0, 1]


def test_peers_are_compared_with_plain_transformers() -> None:
    results = {PLAIN: turns(4.0, 4.0), OFF: turns(2.0, 2.0), AUTO: turns(1.0, 1.0)}
    report = peers_report(results, ["a", "b"], exact=True)
    assert report.figures["all"][OFF]["over"]["median"] == 2.0
    assert report.figures["all"][AUTO]["over"]["median"] == 4.0
    assert report.figures["all"]["same_texts"] == 2
    assert "same_texts" not in peers_report(results, ["a", "b"], exact=False).figures["all"]


def test_transformers_says_the_same_in_all_its_ways(target: Path, drafter: Path) -> None:
    prompt = [5, 6, 7, 5, 6]
    generation = Generation(str(target), str(drafter), lookup=True)
    assert generation.ways == [PLAIN, ASSISTED, LOOKUP]
    for way in generation.ways:
        said = generation.complete(way, prompt, 12, 0.0, 0)
        assert list(said.token_ids) == plain_greedy(target, prompt, 12)
        sampled = [generation.complete(way, prompt, 12, 5.0, seed).token_ids for seed in (1, 1, 2)]
        assert sampled[0] == sampled[1] != sampled[2]


def test_what_transformers_can_not_run_alone_is_said(target: Path, tmp_path: Path) -> None:
    assert why_not(str(target)) == ""
    assert "no directory" in why_not(str(tmp_path / "model.gguf"))
    (tmp_path / "config.json").write_text('{"outrider_draft": {}}')
    assert "its target" in why_not(str(tmp_path))


def test_flags_that_do_not_fit() -> None:
    wrong: list[dict[str, Any]] = [
        {"model": "/t", "drafter": "model"},
        {"drafter": "ngram", "draft_model": "x"},
        {"drafter": "random", "draft_model": "x"},
        {"new_tokens": 1024},
    ]
    for values in wrong:
        with pytest.raises(ConfigError):
            Settings(**values)
