"""How nearly tied the two best tokens were where two answers part."""

from collections.abc import Sequence

from outrider.exactness.reference import Reference
from outrider.messages import SamplingParams
from outrider.sampling.coupled import processed_scores
from outrider.sampling.noise import gumbels
from outrider.sampling.rows import Row


def margin(
    reference: Reference,
    prompt: Sequence[int],
    completion: Sequence[int],
    sampling: SamplingParams,
    stop_ids: frozenset[int] = frozenset(),
) -> float:
    """The score of the best token after `completion` less that of the second best.

    Scores are those of which the coupled rule takes the best: processed, with the noise of
    the session's seed; at temperature 0 without either.
    """
    row = Row(sampling, [*prompt, *completion], (), len(prompt), stop_ids)
    scores = processed_scores(reference.logits([row.committed]).float(), [row])
    if sampling.temperature > 0:
        scores += gumbels([sampling.seed], [row.position], scores.shape[1])
    best = scores[0].topk(2).values
    return float(best[0] - best[1])
