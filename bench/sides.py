"""What is compared with each other: something that continues prompts greedily, and how fast."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, DynamicCache


@dataclass(frozen=True, slots=True)
class Completed:
    """How long the prompts took together, and what was said to each."""

    seconds: float
    token_ids: list[list[int]]


class Side(Protocol):
    """One side of a comparison."""

    @property
    def name(self) -> str:
        """What it is called in tables."""
        ...

    def complete(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Completed:
        """Continue prompts together, greedily, by exactly `new_tokens` tokens each."""
        ...


class Transformers:
    """A model under plain transformers in this process: its default attention and cache."""

    name = "transformers"

    def __init__(self, path: str) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._model.train(False)
        # Ends at the length alone, as the other sides do.
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def complete(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Completed:
        """`generate` on prompts of one length."""
        inputs = torch.tensor([list(ids) for ids in prompts])
        began = time.perf_counter()
        output = self._model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=new_tokens,
            do_sample=False,
        )
        token_ids: list[list[int]] = output[:, inputs.shape[1] :].tolist()
        return Completed(time.perf_counter() - began, token_ids)

    def verification(self, context: Sequence[int], rows: int) -> "Forward":
        """A forward of `rows` rows after a context and their best tokens, to be timed."""
        return Forward(self._model, context, rows)


class Forward:
    """Rows after a context whose keys and values are there; a call runs them and gives seconds.

    `best` are the best tokens of the last call.
    """

    @torch.inference_mode()
    def __init__(self, model: Any, context: Sequence[int], rows: int) -> None:
        self.best: list[int] = []
        self._model = model
        self._inputs = torch.tensor([list(context[:rows])])
        self._cache = DynamicCache(config=model.config)
        # By position: the name of the cache's argument changes between versions.
        model(torch.tensor([list(context)]), None, None, self._cache)

    @torch.inference_mode()
    def __call__(self) -> float:
        """Run the rows, and take them out of the cache again."""
        began = time.perf_counter()
        logits = self._model(self._inputs, None, None, self._cache).logits
        self.best = logits[0].argmax(-1).tolist()
        taken = time.perf_counter() - began
        self._cache.crop(-self._inputs.shape[1])
        return taken
