"""The coupled rule: the target's token is a pure function of logits, seed and position.

    y_t = argmax_v( logits_t[v] / T + gumbel(seed, t, v) )       over the processed distribution

By the Gumbel-max trick y_t is an exact sample of the target's distribution. A drafter that
uses the same noise on its own logits tends to guess the same token (Daliri, Musco, Suresh,
"Coupling without Communication and Drafter-Invariant Speculative Decoding", arXiv
2408.07978), and what is emitted is always the target's own token.
"""

from collections.abc import Sequence

import torch

from outrider.messages import SamplingParams
from outrider.sampling.noise import gumbels
from outrider.sampling.processors import processed_scores


def target_tokens(
    logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> list[int]:
    """The token that the rule chooses on each row.

    Args:
        logits: float [R, V], finite.
        params: R parameters; temperature 0 is a plain argmax.
        positions: R indices in the sequence of the token that is chosen, which is the
            number of tokens before it.
    """
    tokens = logits.argmax(-1)
    sampled = [row for row, param in enumerate(params) if param.temperature > 0]
    if sampled:
        chosen = [params[row] for row in sampled]
        scores = processed_scores(logits[sampled], chosen)
        scores += gumbels(
            [param.seed for param in chosen],
            [positions[row] for row in sampled],
            logits.shape[-1],
            device=logits.device,
        )
        tokens[sampled] = scores.argmax(-1)
    result: list[int] = tokens.tolist()
    return result


def unusable_rows(logits: torch.Tensor) -> list[int]:
    """Rows of [R, V] logits that no token can be chosen from: NaN, +inf, or all -inf."""
    rows: list[int] = (~logits.amax(-1).isfinite()).nonzero().flatten().tolist()
    return rows
