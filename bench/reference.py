"""What plain transformers says: the reference that nobody here wrote."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM


class Reference:
    """A model under transformers `generate`, in this process."""

    def __init__(self, path: str) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._model.train(False)

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], new_tokens: int) -> list[int]:
        """The greedy continuation, the end-of-sequence token included."""
        output = self._model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=new_tokens,
            do_sample=False,
        )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens

    @torch.inference_mode()
    def margin(self, tokens: Sequence[int]) -> float:
        """How far apart the two best logits after `tokens` are."""
        logits = self._model(input_ids=torch.tensor([list(tokens)])).logits[0, -1]
        best = logits.topk(2).values
        return float(best[0] - best[1])


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first index where two sequences differ; None when they are equal."""
    for index, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))
