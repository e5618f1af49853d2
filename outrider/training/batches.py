"""Batches of texts of about one length, in an order that a seed gives."""

import random
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from outrider.training.corpus import Example
from outrider.training.network import Texts

# Texts that are sorted by length among each other: more pad less, and are less mixed.
_SORTED_TEXTS = 256


def stack(examples: Sequence[Example], most_prompt: int) -> Texts:
    """Texts side by side; of a prompt its last `most_prompt` tokens."""
    prompts = [example.prompt[-most_prompt:] for example in examples]
    prompt_len = max(len(prompt) for prompt in prompts)
    answer_len = max(len(example.answer) for example in examples)
    count, hidden_size = len(examples), examples[0].hidden.shape[1]
    ids = np.zeros((count, prompt_len + answer_len), np.int64)
    prompt_mask = np.zeros((count, prompt_len), np.bool_)
    answer_mask = np.zeros((count, answer_len), np.bool_)
    hidden = np.zeros((count, answer_len, hidden_size), np.float32)
    for row, (prompt, example) in enumerate(zip(prompts, examples, strict=True)):
        begin, length = prompt_len - len(prompt), len(example.answer)
        ids[row, begin:prompt_len] = prompt
        ids[row, prompt_len : prompt_len + length] = example.answer
        prompt_mask[row, begin:] = True
        answer_mask[row, :length] = True
        hidden[row, :length] = example.hidden
    return Texts(*(torch.from_numpy(part) for part in (ids, prompt_mask, answer_mask, hidden)))


def epoch(
    examples: Sequence[Example], *, tokens: int, chance: random.Random
) -> list[list[Example]]:
    """Every text once, in batches of about `tokens` answer tokens, padding included."""
    order = list(examples)
    chance.shuffle(order)
    batches: list[list[Example]] = []
    for begin in range(0, len(order), _SORTED_TEXTS):
        some = sorted(order[begin : begin + _SORTED_TEXTS], key=lambda e: len(e.answer))
        found: list[list[Example]] = [[]]
        for example in some:
            if found[-1] and (len(found[-1]) + 1) * len(example.answer) > tokens:
                found.append([])
            found[-1].append(example)
        chance.shuffle(found)
        batches += found
    return batches


def endless(
    examples: Sequence[Example], *, tokens: int, seed: int, skip: int = 0
) -> Iterator[list[Example]]:
    """Epoch after epoch, the first `skip` batches left out: where a run goes on."""
    for number in range(1_000_000):
        for batch in epoch(examples, tokens=tokens, chance=random.Random(f"{seed}/{number}")):
            if skip:
                skip -= 1
                continue
            yield batch
