"""The coupled rule: the target's token is a pure function of logits, seed and position.

    y_t = argmax_v( s_t[v] + gumbel(seed, t, v) )       s_t: scores of the processed distribution

By the Gumbel-max trick y_t is an exact sample of the target's distribution. A drafter that
uses the same noise on its own logits tends to guess the same token (Daliri, Musco, Suresh,
"Coupling without Communication and Drafter-Invariant Speculative Decoding", arXiv
2408.07978), and what is emitted is always the target's own token.
"""

from collections.abc import Sequence

import torch

from outrider.sampling.noise import gumbels
from outrider.sampling.processors import constrained_scores, constrains, warped_scores
from outrider.sampling.rows import Row


def target_tokens(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """The token that the rule chooses on each row of float [R, V] logits."""
    tokens = logits.argmax(-1)
    special = [r for r, row in enumerate(rows) if constrains(row.sampling) or is_sampled(row)]
    if special:
        tokens[special] = _chosen(logits[special], [rows[r] for r in special])
    result: list[int] = tokens.tolist()
    return result


def processed_scores(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Scores whose softmax is the processed distribution p of each row, float64 [R, V].

    With temperature 0 they are the scores of which the best is chosen.
    """
    scores = constrained_scores(logits, rows)
    sampled = [r for r, row in enumerate(rows) if is_sampled(row)]
    if sampled:
        scores[sampled] = warped_scores(scores[sampled], [rows[r].sampling for r in sampled])
    return scores


def is_sampled(row: Row) -> bool:
    """Whether the row's token is drawn rather than the best one."""
    return row.sampling.temperature > 0


def unusable_rows(logits: torch.Tensor) -> list[int]:
    """Rows of [R, V] scores that no token can be chosen from: NaN, +inf, or all -inf."""
    rows: list[int] = (~logits.amax(-1).isfinite()).nonzero().flatten().tolist()
    return rows


def dead_rows(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """Rows of raw [R, V] logits that decide nothing: unusable, or with every token barred.

    What `target_tokens` says of such a row means nothing.
    """
    dead = set(unusable_rows(logits))
    constrained = [r for r, row in enumerate(rows) if constrains(row.sampling)]
    if constrained:
        scores = constrained_scores(logits[constrained], [rows[r] for r in constrained])
        dead.update(constrained[index] for index in unusable_rows(scores))
    return sorted(dead)


def _chosen(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    scores = processed_scores(logits, rows)
    sampled = [r for r, row in enumerate(rows) if is_sampled(row)]
    if sampled:
        scores[sampled] += gumbels(
            [rows[r].sampling.seed for r in sampled],
            [rows[r].position for r in sampled],
            logits.shape[-1],
            device=logits.device,
        )
    return scores.argmax(-1)
