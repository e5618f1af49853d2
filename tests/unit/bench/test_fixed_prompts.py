"""Prompts of one length that share no beginning."""

from pathlib import Path

from bench.prompts import prompts_of
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
