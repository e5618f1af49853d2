"""The drafter's side of the rejection rule: q as it is reported, and a sample of just that.

Truncate, renormalise, quantise, and only then sample: the law is exact whatever the first
three steps lose, since the q that is reported is the q that was sampled from.
"""

import torch

from outrider.messages import SparseDistribution
from outrider.sampling.noise import Stream, uniform

# Weights are whole numbers up to this, so that they survive the wire bit for bit.
_UNIT = 1 << 24


def quantised(p: torch.Tensor, top: int) -> SparseDistribution:
    """The `top` likeliest tokens of p (0: all), float64 [V], with whole weights.

    A weight that rounds to 0 is left out; the best token always stays.
    """
    kept = p.topk(min(top, p.shape[0])) if top else p.sort(descending=True, stable=True)
    weights = (kept.values / kept.values.sum() * _UNIT).round().long()
    count = max(int((weights > 0).sum()), 1)
    ids = kept.indices[:count].tolist()
    return SparseDistribution(tuple(ids), tuple(weights[:count].clamp_min(1).tolist()))


def draw(q: SparseDistribution, seed: int, position: int) -> int:
    """A token from q, by inversion with the session's DRAFT noise."""
    threshold = uniform(seed, position, Stream.DRAFT) * sum(q.weights)
    reached = 0
    for token, weight in zip(q.token_ids, q.weights, strict=True):
        reached += weight
        if threshold < reached:
            return token
    return q.token_ids[-1]
