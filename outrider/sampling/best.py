"""The best token of each row, and whether the row decides anything."""

import torch

# A maximum over the last dimension is far cheaper than its place, so the place is looked for
# in one block of this many tokens only.
_BLOCK = 256


def best_tokens(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The best score of each row of [R, V] and the lowest id that has it, both [R].

    A score that is not finite is that of a row that no token can be chosen from: NaN where
    there is one, +inf, or all -inf. Its id means nothing then.
    """
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
