"""The target as plain transformers runs it: what a deployed system is compared with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GgufConfig
from transformers.utils import logging as transformers_logging

from outrider.errors import ConfigError
from outrider.model.describe import locate_checkpoint
from outrider.model.tokenizers import Tokenizer, load_tokenizer, producible_ids

# Contexts in one forward pass of the reference.
_BATCH = 64


class Reference:
    """A causal LM in float32 with the attention of transformers; padding ids are barred."""

    def __init__(self, module: Any, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        rows = module.get_input_embeddings().weight.shape[0]
        self.token_count = producible_ids(tokenizer, rows)
        self._padding = list(range(self.token_count, rows))
        self._module = module.eval()

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], new_tokens: int) -> list[int]:
        """What `generate` says greedily, the end-of-sequence token included."""
        output = self._module.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=new_tokens,
            do_sample=False,
            # A checkpoint may bring sampling parameters of its own.
            temperature=None,
            top_p=None,
            top_k=None,
            suppress_tokens=self._padding or None,
        )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens

    @torch.inference_mode()
    def logits(self, contexts: Sequence[Sequence[int]]) -> torch.Tensor:
        """The logits after each of the contexts, all of one length: float64 [N, token_count]."""
        parts = []
        for begin in range(0, len(contexts), _BATCH):
            tokens = torch.tensor([list(c) for c in contexts[begin : begin + _BATCH]])
            parts.append(self._module(input_ids=tokens).logits[:, -1, : self.token_count])
        return torch.cat(parts).double()

    def margin(self, context: Sequence[int]) -> float:
        """How far apart the two best logits after `context` are."""
        best = self.logits([context])[0].topk(2).values
        return float(best[0] - best[1])


def load_reference(path: str) -> Reference:
    """Load a transformers directory or a .gguf file.

    Raises:
        ConfigError: there is no checkpoint at `path`, or it can't be read.
    """
    locate_checkpoint(path)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # no hints there
    where, options = Path(path), {}
    if where.suffix == ".gguf":
        options = {"gguf_file": where.name, "quantization_config": GgufConfig(dequantize=True)}
        where = where.parent
    try:
        module = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, **options)
    except (ValueError, OSError) as error:
        raise ConfigError(f"transformers can't load {path}: {error}") from error
    return Reference(module, load_tokenizer(path))
