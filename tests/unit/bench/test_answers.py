"""Answers of the target: its own greedy ones, written once."""

from pathlib import Path
from typing import Any

import pytest

from bench import answers
from bench.answers import plain_greedy
from outrider.model.loading import load_model
from tests.support import models

PROMPTS = [("a", [5, 6, 7]), ("b", list(range(40))), ("a", [9])]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save_model(tmp_path_factory.mktemp("target"))


def ask(target: Path, keep: Path | None, prompts: Any = PROMPTS) -> list[answers.Said]:
    # A model that has been asked has given its weights away.
    model = load_model(str(target))
    return plain_greedy(
        model, prompts, new_tokens=12, token_count=models.TOKENS, at_once=2, keep=keep
    )


def test_the_target_says_what_it_says_alone(target: Path) -> None:
    said = ask(target, None)
    assert [(answer.category, answer.prompt) for answer in said] == PROMPTS
    for answer in said:
        assert answer.tokens == models.plain_greedy(target, answer.prompt, 12)
        assert answer.hidden is not None
        assert answer.hidden.shape == (len(answer.tokens), 32)


def test_what_is_kept_is_not_asked_for_again(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ask(target, tmp_path)
    other = ask(target, tmp_path, [("a", [1, 2])])
    monkeypatch.delattr(answers, "Writer")
    again = ask(target, tmp_path)
    for one, two in zip(first, again, strict=True):
        assert (one.prompt, one.tokens) == (two.prompt, two.tokens)
        assert one.hidden is not None
        assert two.hidden is not None
        assert one.hidden.tobytes() == two.hidden.tobytes()
    assert ask(target, tmp_path, [("a", [1, 2])])[0].tokens == other[0].tokens
    with pytest.raises(NameError):
        ask(target, tmp_path, [("a", [3])])
