"""Tiny random drafters for a target, as `outrider train` writes them, and what they compute."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from outrider.model.describe import describe
from outrider.sampling.coupled import target_tokens
from outrider.sampling.rows import Row
from tests.support.models import CONTEXT, TOKENS, save_tokenizer

OUR_TENSORS = ("fuse.weight", "token_norm.weight", "hidden_norm.weight", "missing", "d2t", "t2d")


def save_draft_network(
    where: Path,
    target: Path,
    *,
    reads_hidden: bool = True,
    ids: Sequence[int] | None = None,
    own_embeddings: bool = False,
    own_head: bool = False,
    layers: int = 1,
    seed: int = 5,
    **changes: Any,
) -> Path:
    """A drafter of random weights for a target; `ids` are those that its head has, None all.

    `changes` go into its config.
    """
    model = AutoModelForCausalLM.from_pretrained(target)
    vocab, size = model.get_input_embeddings().weight.shape
    torch.manual_seed(seed)
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[list(range(vocab) if ids is None else ids)] = True
    kept = mask.nonzero().flatten()
    config = LlamaConfig(
        vocab_size=len(kept),
        hidden_size=size,
        intermediate_size=2 * size,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    network = LlamaForCausalLM(config)
    tensors = {
        name: tensor
        for name, tensor in network.state_dict().items()
        if name not in ("model.embed_tokens.weight", "lm_head.weight")
    }
    if own_embeddings:
        tensors["model.embed_tokens.weight"] = torch.randn(vocab, size)
    if own_head:
        tensors["lm_head.weight"] = torch.randn(len(kept), size) * 0.3
    if reads_hidden:
        tensors["fuse.weight"] = torch.randn(size, 2 * size) * 0.3
        tensors["token_norm.weight"] = torch.rand(size) + 0.5
        tensors["hidden_norm.weight"] = torch.rand(size) + 0.5
        tensors["missing"] = torch.randn(size)
    tensors["d2t"] = kept - torch.arange(len(kept))
    tensors["t2d"] = mask
    where.mkdir(parents=True, exist_ok=True)
    save_file({name: t.clone().contiguous() for name, t in tensors.items()}, where / FILE)
    draft = {
        "reads_hidden": reads_hidden,
        "target": target.name,
        "target_fingerprint": describe(str(target)).fingerprint,
        "target_hidden": size,
        "target_layers": model.config.num_hidden_layers,
        "own_embeddings": own_embeddings,
        "own_head": own_head,
        "trained_with": {},
    }
    values = {**config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    values["outrider_draft"] = draft | changes
    (where / "config.json").write_text(json.dumps(values))
    save_tokenizer(where)
    return where


FILE = "model.safetensors"


class ReferenceNetwork:
    """The network by transformers and plain arithmetic: the whole sequence, without a cache."""

    def __init__(self, path: Path, target: Path) -> None:
        self._tensors = load_file(path / FILE)
        model = AutoModelForCausalLM.from_pretrained(target)
        config = LlamaConfig.from_pretrained(path)
        self._eps = config.rms_norm_eps
        self._network = LlamaForCausalLM(config).eval()
        mask = self._tensors["t2d"]
        self.head_ids = mask.nonzero().flatten()
        head = self._tensors.get("lm_head.weight", model.get_output_embeddings().weight[mask])
        weights = {n: t for n, t in self._tensors.items() if n not in OUR_TENSORS}
        weights["lm_head.weight"] = head
        self._embeddings = self._tensors.get(
            "model.embed_tokens.weight", model.get_input_embeddings().weight
        )
        weights.pop("model.embed_tokens.weight", None)
        missing = self._network.load_state_dict(weights, strict=False)
        assert missing.missing_keys == ["model.embed_tokens.weight"]

    @torch.inference_mode()
    def step(
        self, tokens: Sequence[int], states: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [R] after the tokens, and the state that the next one is made of."""
        x = self._embeddings[list(tokens)]
        if "missing" in self._tensors:
            f = torch.stack([self._tensors["missing"] if s is None else s for s in states])
            both = [
                self._norm(x) * self._tensors["token_norm.weight"],
                self._norm(f) * self._tensors["hidden_norm.weight"],
            ]
            x = torch.cat(both, -1) @ self._tensors["fuse.weight"].T
        output = self._network(inputs_embeds=x[None], use_cache=False, output_hidden_states=True)
        return output.logits[0, -1], output.hidden_states[-1][0, -1]

    def draft(
        self,
        tokens: Sequence[int],
        states: Sequence[torch.Tensor | None],
        count: int,
        sampling: Any,
        token_count: int = TOKENS,
    ) -> tuple[int, ...]:
        """What it drafts, token by token, each made of the state before it."""
        text, known = list(tokens), list(states)
        for _ in range(count):
            logits, state = self.step(text, known)
            wide = torch.full((max(token_count, int(self.head_ids.max()) + 1),), -torch.inf)
            wide[self.head_ids] = logits
            text += target_tokens(wide[None, :token_count], [Row(sampling, text)])
            known.append(state)
        return tuple(text[len(tokens) :])

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self._eps).sqrt()
