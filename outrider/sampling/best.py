"""The best token of each row, and whether the row decides anything."""

import numpy as np
import torch

# For torch a maximum over the last dimension is far cheaper than its place, so the place is
# looked for in one block of this many tokens only.
_BLOCK = 256
_NUMPY = (torch.float32, torch.float64)


def best_tokens(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The best score of each row of [R, V] and the lowest id that has it, both [R].

    A score that is not finite is that of a row that no token can be chosen from: NaN where
    there is one, +inf, or all -inf. Its id means nothing then.
    """
    if _suits_numpy(scores):
        # One pass, vectorised, and the first of equals; NaN counts as the largest.
        table = scores.numpy()
        places = table.argmax(-1)
        values = table[np.arange(len(table)), places]
        return torch.from_numpy(values), torch.from_numpy(places)
    size = scores.shape[1]
    whole = size - size % _BLOCK
    if whole <= _BLOCK:
        values, ids = scores.max(-1)
        return values, ids
    blocks = scores[:, :whole].view(len(scores), -1, _BLOCK)
    values, block = blocks.amax(-1).max(-1)
    rows = torch.arange(len(scores), device=scores.device)
    ids = blocks[rows, block].max(-1).indices + block * _BLOCK
    if whole < size:
        rest, place = scores[:, whole:].max(-1)
        ids = torch.where(rest > values, place + whole, ids)
        # Of a NaN and a number the NaN.
        values = torch.maximum(values, rest)
    return values, ids


def finite(values: torch.Tensor) -> torch.Tensor:
    """Which of a few values are finite: bool, of the same shape."""
    if _suits_numpy(values):
        return torch.from_numpy(np.isfinite(values.numpy()))
    return values.isfinite()


def _suits_numpy(tensor: torch.Tensor) -> bool:
    """On a CPU a call of numpy costs a tenth of the several operators that torch needs."""
    return tensor.device.type == "cpu" and tensor.dtype in _NUMPY
