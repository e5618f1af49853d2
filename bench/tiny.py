"""Tiny random models with a tokenizer of one letter a token, written on the spot."""

import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

CONTEXT = 256
END = "<eos>"


def write_model(
    where: Path,
    *,
    letters: int,
    end: bool = False,
    scale: float = 4.0,
    seed: int = 0,
    context: int = CONTEXT,
) -> Path:
    """A random Llama over `letters` letters (and, with `end`, an end-of-sequence token).

    `context` is its longest, in tokens. `scale` widens the weights, so that logits differ clearly
    and attention matters.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # no hints there
    torch.manual_seed(seed)
    tokenizer = _tokenizer(letters, end)
    end_id = letters if end else None
    config = LlamaConfig(
        vocab_size=letters + end,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=context,
        bos_token_id=None,
        eos_token_id=end_id,
        pad_token_id=None,
    )
    # Typed loosely: the hints of transformers do not cover what is used of it here.
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    model.save_pretrained(where)
    tokenizer.save_pretrained(where)
    return where


def write_noisy(source: Path, where: Path, *, noise: float, layers: int = 0, seed: int = 1) -> Path:
    """A copy of a model with noise on its weights, a drafter that is right less often.

    `noise` is relative to the standard deviation of each matrix; `layers` above 0 keeps only
    that many of the first layers.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # no hints there
    model = AutoModelForCausalLM.from_pretrained(source)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and noise:
                jitter = torch.randn(parameter.shape, generator=generator)
                parameter.add_(jitter * noise * parameter.std(correction=0))
    if layers:
        model.model.layers = model.model.layers[:layers]
        model.config.num_hidden_layers = layers
        if getattr(model.config, "layer_types", None):
            model.config.layer_types = model.config.layer_types[:layers]
    model.save_pretrained(where)
    for pattern in ("tokenizer*", "special_tokens_map.json", "chat_template*"):
        for file in source.glob(pattern):
            shutil.copy(file, where)
    return where


def _tokenizer(letters: int, end: bool) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    first = alphabet.index("a")
    chosen = [*alphabet[first:], *alphabet[:first]][:letters]
    backend = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(chosen)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if end:
        backend.add_special_tokens([END])
    wrapped: Any = PreTrainedTokenizerFast
    return wrapped(tokenizer_object=backend, eos_token=END if end else None)
