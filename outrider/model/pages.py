"""The pages that KV is kept in: for each layer keys and values, block by block."""

from collections.abc import Sequence

import torch

from outrider.model.blocks import BLOCK_TOKENS
from outrider.model.rows import Span

# Where a sequence's blocks are: neighbours are a slice, which copies nothing.
BlockIndex = slice | torch.Tensor


class KvPages:
    """Keys [blocks, BLOCK_TOKENS, Hkv, D] and values [blocks, BLOCK_TOKENS, Hkv, Dv] by layer.

    `shapes` gives (Hkv, D, Dv) of each layer.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int, int]],
        total_blocks: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.device = device
        self._layers = [
            tuple(
                torch.zeros(total_blocks, BLOCK_TOKENS, heads, dim, dtype=dtype, device=device)
                for dim in dims
            )
            for heads, *dims in shapes
        ]

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keep k [Hkv, N, D] and v [Hkv, N, Dv] at the N `slots` (see `Span.slot`)."""
        for pages, new in zip(self._layers[layer], (k, v), strict=True):
            pages.view(-1, *pages.shape[2:])[slots] = new.transpose(0, 1)

    def read(self, layer: int, where: BlockIndex) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [T, Hkv, D] and values [T, Hkv, Dv] of the T tokens that the blocks hold."""
        keys, values = (_select(pages, where).flatten(0, 1) for pages in self._layers[layer])
        return keys, values

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy the KV at the slots `source` to the slots `target`; the two may overlap."""
        for layer in self._layers:
            for pages in layer:
                flat = pages.view(-1, *pages.shape[2:])
                flat[target] = flat[source]

    def block_index(self, span: Span) -> BlockIndex:
        """The blocks that hold the context of a span."""
        used = list(span.blocks[: -(-span.context // BLOCK_TOKENS)])
        first = used[0]
        if used == list(range(first, first + len(used))):
            return slice(first, first + len(used))
        return torch.tensor(used, device=self.device)


def _select(pages: torch.Tensor, where: BlockIndex) -> torch.Tensor:
    return pages[where] if isinstance(where, slice) else pages.index_select(0, where)
