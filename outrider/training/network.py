"""The draft network: a few decoder layers that may read the target's hidden states.

For the token x_i at position i, with e its embedding and f the hidden state that the target's
head made it of (`missing` where that is not known, as in prompts):

    z_i = fuse [norm(e), norm(f)]            or z_i = e, when no hidden states are read
    h_i = norm(layers(z_0 … z_i))            logits of x_{i+1} = head h_i

Beyond the tokens of the target h_{i-1} stands in for f, so the network learns from *unrolled*
steps: in step s the inputs at a position come from what step s - 1 gave one position before
(Zhang et al., "Learning Harmonized Representations for Speculative Sampling", arXiv 2408.15766;
Li et al., "EAGLE-3", arXiv 2503.01840, call it training-time test).

Shapes: B texts of P prompt tokens, padded at their beginning, and A answer tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

_BARRED = -1e9


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a draft network; those of Llama by their names in transformers."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_hidden_layers: int
    rope_theta: float
    rms_norm_eps: float
    target_hidden: int
    reads_hidden: bool


@dataclass(frozen=True, slots=True)
class Texts:
    """A batch of texts.

    ids [B, P + A]; prompt [B, P] and answer [B, A], where there is a token; hidden [B, A,
    target_hidden], what the target's head made each answer token of.
    """

    ids: torch.Tensor
    prompt: torch.Tensor
    answer: torch.Tensor
    hidden: torch.Tensor

    @property
    def answer_ids(self) -> torch.Tensor:
        """[B, A]."""
        return self.ids[:, self.prompt.shape[1] :]

    @property
    def positions(self) -> torch.Tensor:
        """Of every token, [B, P + A]."""
        lengths = self.prompt.sum(1, keepdim=True)
        answer = lengths + torch.arange(self.answer.shape[1])
        return torch.cat([(self.prompt.cumsum(1) - 1).clamp_min(0), answer], 1)


class Norm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The norm over the last dimension."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """The linears of an attention, by their names in transformers."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        size, head = shape.hidden_size, shape.head_dim
        self.head_dim = head
        self.groups = shape.num_attention_heads // shape.num_key_value_heads
        self.q_proj = nn.Linear(size, shape.num_attention_heads * head, bias=False)
        self.k_proj = nn.Linear(size, shape.num_key_value_heads * head, bias=False)
        self.v_proj = nn.Linear(size, shape.num_key_value_heads * head, bias=False)
        self.o_proj = nn.Linear(shape.num_attention_heads * head, size, bias=False)

    def queries(self, x: torch.Tensor, turn: "Turn") -> torch.Tensor:
        """[B, T, H, D]."""
        return turn(self.q_proj(x).unflatten(-1, (-1, self.head_dim)))

    def keys_values(self, x: torch.Tensor, turn: "Turn") -> tuple[torch.Tensor, torch.Tensor]:
        """Both [B, T, H, D], repeated for the heads that share them."""
        keys = turn(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))
        values = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        return (
            keys.repeat_interleave(self.groups, 2),
            values.repeat_interleave(self.groups, 2),
        )


class Mlp(nn.Module):
    """down(silu(gate) * up)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        size, inner = shape.hidden_size, shape.intermediate_size
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of rows [..., hidden]."""
        gated: torch.Tensor = functional.silu(self.gate_proj(x)) * self.up_proj(x)
        result: torch.Tensor = self.down_proj(gated)
        return result


class Layer(nn.Module):
    """A decoder layer of Llama."""

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self._dropout = dropout
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)

    def after(self, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """The rest of the layer, given what attention mixed [B, T, H, D] for the rows x."""
        x = x + self._thinned(self.self_attn.o_proj(mixed.flatten(2)))
        after: torch.Tensor = x + self._thinned(self.mlp(self.post_attention_layernorm(x)))
        return after

    def _thinned(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, self._dropout, self.training)


class Turn:
    """Rotary embedding of some positions [B, T], for heads [B, T, H, D]."""

    def __init__(self, positions: torch.Tensor, theta: float, size: int) -> None:
        frequencies = theta ** -(torch.arange(0, size, 2, dtype=torch.float32) / size)
        angles = positions[..., None].float() * frequencies
        angles = torch.cat([angles, angles], -1)[:, :, None]
        self._cos, self._sin = angles.cos(), angles.sin()

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """Turned."""
        half = heads.shape[-1] // 2
        swapped = torch.cat([-heads[..., half:], heads[..., :half]], -1)
        return heads * self._cos + swapped * self._sin


class DraftNetwork(nn.Module):
    """The trained parts; `embeddings` [V, target_hidden] and `head` [R, hidden] stay as they are.

    Parameters have the names of transformers' Llama, for the file that is written in the end.
    """

    def __init__(
        self,
        shape: Shape,
        embeddings: torch.Tensor,
        head: torch.Tensor,
        *,
        dropout: float = 0.0,
    ) -> None:
        """In training a share `dropout` of inputs, and of what each layer adds, is left out."""
        super().__init__()
        self._dropout = dropout
        self.shape = shape
        self.embeddings = embeddings
        self.head = head
        eps = shape.rms_norm_eps
        self.layers = nn.ModuleList(Layer(shape, dropout) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, eps)
        if shape.reads_hidden:
            self.token_norm = Norm(shape.target_hidden, eps)
            self.hidden_norm = Norm(shape.target_hidden, eps)
            self.missing = nn.Parameter(torch.zeros(shape.target_hidden))
            self.fuse = nn.Linear(2 * shape.target_hidden, shape.hidden_size, bias=False)

    @property
    def stack(self) -> list[Layer]:
        """The layers, first to last."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def inputs(self, ids: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
        """z of tokens [B, T] and the states [B, T, target_hidden] they were made of, if known."""
        embedded = functional.embedding(ids, self.embeddings)
        if not self.shape.reads_hidden:
            return embedded
        if hidden is None:
            hidden = self.missing.expand_as(embedded)
        both = torch.cat([self.token_norm(embedded), self.hidden_norm(hidden)], -1)
        fused: torch.Tensor = self.fuse(functional.dropout(both, self._dropout, self.training))
        return fused

    def unroll(self, texts: Texts, steps: int) -> list[torch.Tensor]:
        """The states h [B, A, hidden] of each step; those of step s mean something from slot s on.

        Slot j of step s (from 0) is what a drafter has at answer token j when its last s inputs
        are its own: it predicts token j + 1. Without hidden states there is one step, which
        serves for all.
        """
        prompt_len = texts.prompt.shape[1]
        turns = Turn(texts.positions, self.shape.rope_theta, self.shape.head_dim)
        answer_turns = Turn(
            texts.positions[:, prompt_len:], self.shape.rope_theta, self.shape.head_dim
        )
        rows = torch.cat(
            [
                self.inputs(texts.ids[:, :prompt_len], None),
                self.inputs(texts.answer_ids, texts.hidden),
            ],
            1,
        )
        memories = [_Memory(texts) for _ in self.layers]
        results = [self._first(rows, memories, turns, texts)]
        while len(results) < steps:
            before = functional.pad(results[-1], (0, 0, 1, 0))[:, :-1]
            x = self.inputs(texts.answer_ids, before)
            for layer, memory in zip(self.stack, memories, strict=True):
                normed = layer.input_layernorm(x)
                memory.add(*layer.self_attn.keys_values(normed, answer_turns))
                x = layer.after(x, memory.attend(layer.self_attn.queries(normed, answer_turns)))
            results.append(self.norm(x))
        return results

    def _first(
        self, rows: torch.Tensor, memories: Sequence["_Memory"], turns: Turn, texts: Texts
    ) -> torch.Tensor:
        """The first step, over prompts and answers."""
        prompt_len, last = texts.prompt.shape[1], len(self.layers) - 1
        for number, (layer, memory) in enumerate(zip(self.stack, memories, strict=True)):
            normed = layer.input_layernorm(rows)
            memory.begin(*layer.self_attn.keys_values(normed, turns))
            queries = layer.self_attn.queries(normed, turns)
            if number == last:
                # Nobody reads what the last layer makes of the prompt.
                rows, queries = rows[:, prompt_len:], queries[:, prompt_len:]
            rows = layer.after(rows, memory.attend(queries))
        states: torch.Tensor = self.norm(rows)
        return states


class _Memory:
    """Keys and values of one layer, those of each step apart.

    A query of step s at slot j sees the prompt, the answer tokens up to j - s by their keys of
    the first step, and then one key of each later step: that of step t at slot j - s + t.
    """

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self._later: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keys and values of the first step, [B, P + A, H, D]."""
        self._keys, self._values = keys, values

    def add(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Those of the next step, [B, A, H, D]."""
        self._later.append((keys, values))

    def attend(self, queries: torch.Tensor) -> torch.Tensor:
        """What the queries of the latest step mix: [B, T, H, D] for the last T tokens."""
        step, scale = len(self._later), queries.shape[-1] ** -0.5
        scores = torch.einsum("bqhd,bkhd->bhqk", queries, self._keys) * scale
        scores = scores + self._mask(queries.shape[1], step)
        own = [
            (queries * _later_by(keys, step - number)).sum(-1).transpose(1, 2)[..., None] * scale
            for number, (keys, _) in enumerate(self._later, 1)
        ]
        weights = torch.cat([scores, *own], -1).softmax(-1)
        count = self._keys.shape[1]
        mixed = torch.einsum("bhqk,bkhd->bqhd", weights[..., :count], self._values)
        for number, (_, values) in enumerate(self._later, 1):
            weight = weights[..., count + number - 1].transpose(1, 2)[..., None]
            mixed = mixed + weight * _later_by(values, step - number)
        return mixed

    def _mask(self, rows: int, step: int) -> torch.Tensor:
        """0 where the last `rows` tokens see a token, [B, 1, rows, P + A]."""
        prompt, total = self._texts.prompt, self._texts.ids.shape[1]
        at = torch.arange(total)
        seen = at[None, :] <= at[-rows:, None] - step
        seen[:, : prompt.shape[1]] |= at[-rows:, None] >= prompt.shape[1]
        real = functional.pad(prompt, (0, total - prompt.shape[1]), value=True)
        allowed = seen[None, None] & real[:, None, None, :]
        # A padded row sees itself, so that its softmax is not one over nothing.
        allowed = allowed | (at[None, :] == at[-rows:, None])[None, None] if step == 0 else allowed
        return torch.where(allowed, 0.0, _BARRED)


def _later_by(rows: torch.Tensor, slots: int) -> torch.Tensor:
    """Rows [B, A, …] moved so many slots on; what comes in is zero."""
    return functional.pad(rows, (0, 0, 0, 0, slots, 0))[:, : rows.shape[1]]
