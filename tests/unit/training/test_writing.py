"""What the target writes is what transformers says, and its states are those of its head."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from outrider.training.corpus import Example
from tests.support.models import plain_greedy
from tests.unit.training.conftest import PROMPTS


def test_answers_are_the_targets_own(target_path: Path, examples: list[Example]) -> None:
    assert [list(example.prompt) for example in examples] == PROMPTS
    for example in examples:
        said = plain_greedy(target_path, list(example.prompt), 14)
        assert list(example.answer)[: len(said)] == said


def test_states_are_what_the_head_made_the_tokens_of(
    target_path: Path, examples: list[Example]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(target_path)
    for example in examples:
        with torch.inference_mode():
            output = model(torch.tensor([example.token_ids]), output_hidden_states=True)
        # The last of transformers' hidden states is normed already.
        states = output.hidden_states[-1][0, example.prompt_len - 1 : -1]
        torch.testing.assert_close(
            torch.from_numpy(example.hidden).float(), states, atol=4e-3, rtol=4e-3
        )
