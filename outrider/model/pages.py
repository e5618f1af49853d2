"""The pages that KV is kept in: for each layer keys and values, token by token."""

from collections.abc import Sequence
from itertools import pairwise

import torch

from outrider.model.blocks import BLOCK_TOKENS
from outrider.model.rows import Span

# Where tokens are kept: neighbours are a slice, which copies nothing, others a list of slots.
Where = slice | torch.Tensor


class KvPages:
    """Keys [T, Hkv, D] and values [T, Hkv, Dv] by layer, T being the tokens of all blocks.

    `shapes` gives (Hkv, D, Dv) of each layer. The two lie beside each other, so that the KV of
    a row is written at once: `rows` [T, Hkv * D + Hkv * Dv]. Memory that was never written to
    is not taken from the system.

    With `keys_by_block` the memory of a block has its keys as [Hkv * D, 16] instead, and after
    them its values as [16, Hkv * Dv]; only `move` can be used then.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int, int]],
        total_blocks: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        keys_by_block: bool = False,
    ) -> None:
        self.device = device
        self.dtype = dtype
        tokens = total_blocks * BLOCK_TOKENS
        self.rows: list[torch.Tensor] = []
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self._key_widths = [heads * key_size for heads, key_size, _ in shapes]
        self._keys_by_block = keys_by_block
        for heads, key_size, value_size in shapes:
            width = heads * (key_size + value_size)
            rows = torch.zeros(tokens, width, dtype=dtype, device=device)
            keys, values = rows[:, : heads * key_size], rows[:, heads * key_size :]
            self.rows.append(rows)
            self.keys.append(keys.view(tokens, heads, key_size))
            self.values.append(values.view(tokens, heads, value_size))

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keep k [Hkv, N, D] and v [Hkv, N, Dv] at the N `slots` (see `Span.slot`)."""
        self.keys[layer].index_copy_(0, slots, k.transpose(0, 1))
        self.values[layer].index_copy_(0, slots, v.transpose(0, 1))

    def read(self, layer: int, where: Where) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [L, Hkv, D] and values [L, Hkv, Dv] of the L tokens there."""
        if isinstance(where, slice):
            return self.keys[layer][where], self.values[layer][where]
        keys, values = self.keys[layer], self.values[layer]
        rows = self.rows[layer].index_select(0, where)
        at = keys.shape[1] * keys.shape[2]
        return rows[:, :at].view(-1, *keys.shape[1:]), rows[:, at:].view(-1, *values.shape[1:])

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy the KV at the slots `source` to the slots `target`; the two may overlap."""
        for rows, key_width in zip(self.rows, self._key_widths, strict=True):
            if not self._keys_by_block:
                rows.index_copy_(0, target, rows.index_select(0, source))
                continue
            blocks = rows.view(-1, BLOCK_TOKENS * rows.shape[1])
            edge = key_width * BLOCK_TOKENS
            keys = blocks[:, :edge].view(len(blocks), key_width, BLOCK_TOKENS)
            values = blocks[:, edge:].view(len(blocks), BLOCK_TOKENS, rows.shape[1] - key_width)
            (to_block, to), (from_block, at) = (
                (slots // BLOCK_TOKENS, slots % BLOCK_TOKENS) for slots in (target, source)
            )
            keys[to_block, :, to] = keys[from_block, :, at]
            values[to_block, to] = values[from_block, at]

    def where(self, span: Span, begin: int, end: int) -> Where:
        """Where the KV of the tokens [begin, end) of a sequence is kept."""
        blocks = span.blocks[begin // BLOCK_TOKENS : -(-end // BLOCK_TOKENS)]
        first = blocks[0] * BLOCK_TOKENS + begin % BLOCK_TOKENS
        if all(b == blocks[0] + i for i, b in enumerate(blocks)):
            return slice(first, first + end - begin)
        slots = torch.tensor(blocks).mul_(BLOCK_TOKENS)[:, None] + torch.arange(BLOCK_TOKENS)
        skip = begin % BLOCK_TOKENS
        return slots.flatten()[skip : skip + end - begin].to(self.device)


def runs(span: Span) -> list[tuple[int, int]]:
    """The context of a span cut where its blocks are not neighbours: token ranges [begin, end)."""
    used = span.blocks[: -(-span.context // BLOCK_TOKENS)]
    cuts = [i for i in range(1, len(used)) if used[i] != used[i - 1] + 1]
    edges = [0, *(i * BLOCK_TOKENS for i in cuts), span.context]
    return list(pairwise(edges))
