"""How compiled products want their weights."""

from collections.abc import Sequence

import torch

from outrider.model.compiled.kernels import TILE
from outrider.model.compiled.vectors import UNROLL


def padded(columns: int) -> int:
    """Columns of a product's result in memory: whole panels."""
    return -(-columns // TILE.columns) * TILE.columns


def fits(weight: torch.Tensor) -> bool:
    """Whether a product with a weight [N, K] can be compiled."""
    cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
    return cpu and weight.shape[1] % UNROLL == 0


def panels(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Weights [N, K] one below the other, as panels [ceil(sum N / C), K, C] that end in zeros."""
    length = weights[0].shape[1]
    rows = sum(len(weight) for weight in weights)
    packed = torch.zeros(padded(rows) // TILE.columns, length, TILE.columns)
    transposed = packed.transpose(1, 2)
    begin = 0
    for weight in weights:
        for panel in range(begin // TILE.columns, padded(begin + len(weight)) // TILE.columns):
            first, last = panel * TILE.columns, (panel + 1) * TILE.columns
            low, high = max(first, begin), min(last, begin + len(weight))
            transposed[panel, low - first : high - first] = weight[low - begin : high - begin]
        begin += len(weight)
    return packed
