"""Prompts of some categories, and prompts of one length that share no beginning."""

from pathlib import Path

import pytest

from bench.prompts import load_prompts, prompts_of
from outrider.errors import ConfigError
from outrider.model.tokenizers import load_tokenizer
from tests.support.models import save_tokenizer


def test_prompts_have_exactly_that_length_and_begin_differently(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    for tokens in (16, 700):
        prompts = prompts_of(tokenizer, 40, tokens, first=-3)
        assert {len(prompt) for prompt in prompts} == {tokens}
        assert len({tuple(prompt[:16]) for prompt in prompts}) == 40
        assert prompts_of(tokenizer, 2, tokens, first=5) == prompts[8:10]


def test_only_prompts_of_the_categories_that_are_asked_for() -> None:
    found = load_prompts(None, 3, ("code", "writing"))
    assert [prompt.category for prompt in found] == ["writing", "code", "writing"]
    assert len(load_prompts(None, 100)) == 10
    with pytest.raises(ConfigError, match=r"no prompts of rag; there are writing, .*"):
        load_prompts(None, 3, ("code", "rag"))
