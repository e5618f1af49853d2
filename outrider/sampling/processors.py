"""From logits to the processed distribution: temperature, top-k, top-p, in this order.

The order and the meaning of each are those of transformers' `TemperatureLogitsWarper`,
`TopKLogitsWarper` and `TopPLogitsWarper`.
"""

from collections.abc import Sequence

import torch

from outrider.messages import SamplingParams


def processed_scores(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Scores whose softmax is the processed distribution p of each row.

    Args:
        logits: float [R, V].
        params: R parameters with a temperature above 0.

    Returns:
        float64 [R, V]; tokens that are cut away have -inf.
    """
    temperatures = [param.temperature for param in params]
    scale = torch.tensor(temperatures, dtype=torch.float64, device=logits.device)
    # The maximum goes first, so that a tiny temperature overflows to -inf and never to +inf.
    scores = logits.double()
    scores = (scores - scores.amax(-1, keepdim=True)) / scale[:, None]
    _keep_top_k(scores, [param.top_k for param in params])
    _keep_top_p(scores, [param.top_p for param in params])
    return scores


def _keep_top_k(scores: torch.Tensor, top_ks: Sequence[int]) -> None:
    """Cut everything below the k-th best score of a row; equals of the k-th stay."""
    for row, top_k in enumerate(top_ks):
        if 0 < top_k < scores.shape[-1]:
            kth = scores[row].topk(top_k).values[-1]
            scores[row].masked_fill_(scores[row] < kth, -torch.inf)


def _keep_top_p(scores: torch.Tensor, top_ps: Sequence[float]) -> None:
    """Keep the smallest set of best tokens whose mass reaches top_p."""
    for row, top_p in enumerate(top_ps):
        if top_p >= 1.0:
            continue
        # Ascending and stable, so that ties fall the same way in every batch.
        ordered, order = scores[row].sort(stable=True)
        cut = ordered.softmax(-1).cumsum(-1) <= 1.0 - top_p
        cut[-1] = False
        scores[row].masked_fill_(torch.zeros_like(cut).scatter_(0, order, cut), -torch.inf)
