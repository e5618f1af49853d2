"""transformers `generate` on one prompt: alone, with an assistant model, or with prompt lookup."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.turns import Turn
from outrider.model.draft_config import KEY
from outrider.model.tokenizers import load_tokenizer, producible_ids

PLAIN, ASSISTED, LOOKUP = "transformers", "assisted", "prompt lookup"
# Tokens of a looked-up draft, as transformers documents it.
LOOKUP_TOKENS = 10


def why_not(path: str) -> str:
    """Why transformers can't run a model on its own; empty where it can."""
    config = Path(path) / "config.json"
    if not config.is_file():
        return f"{path} is no directory of transformers"
    if KEY in json.loads(config.read_text()):
        return f"{path} is a drafter that runs with its target only"
    return ""


class Generation:
    """A target in float32, and where there is one an assistant; defaults of transformers."""

    def __init__(self, path: str, draft_model: str, *, lookup: bool) -> None:
        self._model = _load(path)
        rows = self._model.get_input_embeddings().weight.shape[0]
        # Rows of padding have no token; nobody may say them.
        self._padding = list(range(producible_ids(load_tokenizer(path), rows), rows))
        self._options: dict[str, dict[str, Any]] = {PLAIN: {}}
        if draft_model:
            self._options[ASSISTED] = {"assistant_model": _load(draft_model)}
        if lookup:
            self._options[LOOKUP] = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
        self.ways = list(self._options)

    @torch.inference_mode()
    def complete(
        self, way: str, prompt: Sequence[int], new_tokens: int, temperature: float, seed: int
    ) -> Turn:
        """Continue a prompt in one of `ways`, up to an end of the model's."""
        inputs = torch.tensor([list(prompt)])
        # A checkpoint may bring sampling parameters of its own.
        sampling: dict[str, Any] = {"temperature": None, "top_p": None, "top_k": None}
        if temperature > 0:
            sampling = {"temperature": temperature, "top_p": 1.0, "top_k": 0}
        torch.manual_seed(seed)
        began = time.perf_counter()
        output = self._model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=new_tokens,
            do_sample=temperature > 0,
            suppress_tokens=self._padding or None,
            **sampling,
            **self._options[way],
        )
        seconds = time.perf_counter() - began
        return Turn(tuple(output[0, len(prompt) :].tolist()), seconds)


def _load(path: str) -> Any:
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(path, dtype=torch.float32)
    model.train(False)
    if model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = 0
    return model
