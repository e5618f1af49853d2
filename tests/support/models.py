"""Tiny random models and a tokenizer for them, made on the spot."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

EOS = 256
TOKENS = 257
# More rows than the tokenizer has ids, as real checkpoints have.
VOCABULARY = 272
CONTEXT = 256
WINDOW = 16

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
}
FAMILIES: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**_SHAPE),
    # Heads of whole vectors: this one's forward can be compiled.
    "qwen3": lambda: Qwen3Config(**_SHAPE | {"head_dim": 16}),
    "gemma2": lambda: Gemma2Config(
        **_SHAPE,
        sliding_window=WINDOW,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=20.0,
        final_logit_softcapping=30.0,
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=CONTEXT,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=EOS,
        eos_token_id=EOS,
    ),
    "gpt_neox": lambda: GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=EOS,
    ),
}


def save_tokenizer(where: Path) -> None:
    """A tokenizer with one id a byte and an end-of-sequence token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    fast.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    fast.save_pretrained(where)


def save_model(where: Path, family: str = "llama", *, seed: int = 0, scale: float = 4.0) -> Path:
    """A random model of a family with the tokenizer above, as a transformers directory.

    `scale` widens the weights, so that logits differ clearly and attention matters.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(FAMILIES[family]())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    model.save_pretrained(where)
    save_tokenizer(where)
    return where


def perturbed(source: Path, where: Path, *, noise: float, seed: int = 1) -> Path:
    """A copy of a model with noise on its weights: a drafter that is often right."""
    model = AutoModelForCausalLM.from_pretrained(source)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            jitter = torch.randn(parameter.shape, generator=generator)
            parameter.add_(jitter * noise * parameter.std(correction=0))
    model.save_pretrained(where)
    save_tokenizer(where)
    return where


@torch.inference_mode()
def plain_greedy(path: Path, prompt: list[int], new_tokens: int) -> list[int]:
    """What transformers `generate` says, greedily, with padding ids barred."""
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=new_tokens,
        do_sample=False,
        suppress_tokens=list(range(TOKENS, VOCABULARY)),
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens
