"""Log-probabilities of the tokens that were committed, and of the likeliest ones."""

from collections.abc import Sequence

import torch

from outrider.messages import LogprobOptions, TokenLogprobs
from outrider.sampling.coupled import processed_scores
from outrider.sampling.rows import Row


def token_logprobs(
    logits: torch.Tensor, rows: Sequence[Row], token_ids: Sequence[int], options: LogprobOptions
) -> tuple[TokenLogprobs, ...]:
    """One entry a row of float [R, V] logits, for the token that it committed.

    Raw: of softmax(logits). Processed: of the distribution that the token was chosen from;
    at temperature 0, of the scores of which it is the best, without a temperature. Tokens
    that can't be chosen are not among the best.
    """
    scores = processed_scores(logits, rows) if options.processed else logits.double()
    logprobs = scores.log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])[:, 0]
    best = logprobs.topk(min(options.top, logprobs.shape[1]))
    return tuple(
        TokenLogprobs(
            logprob, tuple((i, v) for i, v in zip(ids, values, strict=True) if v > -torch.inf)
        )
        for logprob, ids, values in zip(
            own.tolist(), best.indices.tolist(), best.values.tolist(), strict=True
        )
    )
