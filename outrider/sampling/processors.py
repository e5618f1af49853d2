"""From logits to the processed distribution.

The order is fixed; where transformers has a processor, it stands where transformers puts it
and means the same (the class is named behind it):

    1  logit_bias           SequenceBiasLogitsProcessor, single tokens
    2  repetition_penalty   RepetitionPenaltyLogitsProcessor
    3  frequency_penalty, presence_penalty          (OpenAI's definition)
    4  bad_words            NoBadWordsLogitsProcessor
    5  min_tokens           MinNewTokensLengthLogitsProcessor
    6  allowed_ids          PrefixConstrainedLogitsProcessor, the same set everywhere
    7  banned_ids           SuppressTokensLogitsProcessor
    8  temperature          TemperatureLogitsWarper
    9  top_k                TopKLogitsWarper
    10 top_p                TopPLogitsWarper
    11 min_p                MinPLogitsWarper

With temperature 0 the token is the best one after step 7. Each function below works on one
row of float64 scores [V], in place; -inf is a token that can't be chosen, and when that is all
of them `coupled.unusable_rows` names the row. Ids outside of the row's vocabulary, which can be
a drafter's smaller one, can't be chosen anyway and are passed over.

Three things differ from transformers, on purpose. A bad word is barred also when it is a single
stop id. Allowed ids that other steps bar stay barred. Where several tokens share the lowest
score that top_p keeps, those with the highest ids stay, whatever the device.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from outrider.messages import SamplingParams
from outrider.sampling.rows import Row

_NEVER = -torch.inf
# How many of the best tokens top_p looks at first, and how close to its limit masses may be
# for a sum in another order to be trusted.
_FEW = 256
_CLEAR = 1e-9


def constrains(sampling: SamplingParams) -> bool:
    """Whether any of steps 1 to 7 does something."""
    return bool(
        sampling.logit_bias
        or sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty
        or sampling.presence_penalty
        or sampling.bad_words
        or sampling.min_tokens
        or sampling.allowed_ids
        or sampling.banned_ids
    )


def constrained_scores(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Scores after steps 1 to 7, as new float64 [R, V]; `logits` is float [R, V]."""
    scores = logits.double()
    if scores is logits:
        scores = logits.clone()
    for score, row in zip(scores, rows, strict=True):
        if constrains(row.sampling):
            _add_bias(score, row.sampling)
            _penalise_repetition(score, row)
            _penalise_counts(score, row)
            _bar_words(score, row)
            _bar_early_stop(score, row)
            _bar_ids(score, row.sampling)
    return scores


def warped_scores(scores: torch.Tensor, samplings: Sequence[SamplingParams]) -> torch.Tensor:
    """Scores after steps 8 to 11, as new float64 [R, V]; every temperature is above 0."""
    temperatures = [sampling.temperature for _, sampling in zip(scores, samplings, strict=True)]
    scale = torch.tensor(temperatures, dtype=torch.float64, device=scores.device)
    # The maximum goes first, so that a tiny temperature overflows to -inf and never to +inf.
    warped = (scores - scores.amax(-1, keepdim=True)).div_(scale[:, None])
    top_k = [sampling.top_k for sampling in samplings]
    _apply(_keep_top_k, warped, top_k, [0 < k < scores.shape[1] for k in top_k])
    top_p = [sampling.top_p for sampling in samplings]
    _apply(_keep_top_p, warped, top_p, [p < 1.0 for p in top_p])
    min_p = [sampling.min_p for sampling in samplings]
    _apply(_keep_min_p, warped, min_p, [p > 0 for p in min_p])
    return warped


def _add_bias(score: torch.Tensor, sampling: SamplingParams) -> None:
    for token, bias in sampling.logit_bias:
        if token < score.shape[0]:
            score[token] += bias


def _penalise_repetition(score: torch.Tensor, row: Row) -> None:
    penalty = row.sampling.repetition_penalty
    if penalty == 1.0:
        return
    seen = _index(set(row.committed).union(row.drafted), score)
    values = score[seen]
    score[seen] = torch.where(values < 0, values * penalty, values / penalty)


def _penalise_counts(score: torch.Tensor, row: Row) -> None:
    frequency, presence = row.sampling.frequency_penalty, row.sampling.presence_penalty
    if not frequency and not presence:
        return
    counts = Counter(token for token in row.completion if token < score.shape[0])
    times = torch.tensor(list(counts.values()), dtype=torch.float64, device=score.device)
    score[_index(counts, score)] -= times * frequency + presence


def _bar_words(score: torch.Tensor, row: Row) -> None:
    for *before, last in filter(None, row.sampling.bad_words):
        known = last < score.shape[0]
        if known and len(before) <= row.position and _last(row, len(before)) == before:
            score[last] = _NEVER


def _bar_early_stop(score: torch.Tensor, row: Row) -> None:
    if row.completion_len < row.sampling.min_tokens and row.stop_ids:
        score[_index(row.stop_ids, score)] = _NEVER


def _bar_ids(score: torch.Tensor, sampling: SamplingParams) -> None:
    if sampling.allowed_ids:
        allowed = _index(sampling.allowed_ids, score)
        kept = score[allowed]
        score.fill_(_NEVER)
        score[allowed] = kept
    if sampling.banned_ids:
        score[_index(sampling.banned_ids, score)] = _NEVER


_Value = TypeVar("_Value", int, float)


def _apply(
    step: Callable[[torch.Tensor, list[_Value]], None],
    scores: torch.Tensor,
    values: list[_Value],
    wanted: list[bool],
) -> None:
    """Do a step on the rows that want it, each with its value, in place."""
    if all(wanted):
        step(scores, values)
    elif any(wanted):
        index = [r for r, want in enumerate(wanted) if want]
        some = scores[index]
        step(some, [values[r] for r in index])
        scores[index] = some


def _keep_top_k(scores: torch.Tensor, top_k: list[int]) -> None:
    """Cut everything below the k-th best score; equals of the k-th stay."""
    index = torch.tensor(top_k, device=scores.device)[:, None] - 1
    kth = scores.topk(max(top_k)).values.gather(1, index)
    scores.masked_fill_(scores < kth, _NEVER)


def _keep_top_p(scores: torch.Tensor, top_p: list[float]) -> None:
    """Keep the smallest set of best tokens whose mass reaches top_p.

    That takes a sort of the vocabulary, or where the mass and the cut are clear the best few.
    """
    best = scores.topk(min(_FEW, scores.shape[1])).values
    p = (best - scores.logsumexp(-1, keepdim=True)).exp()
    # The mass of better tokens; where it reaches top_p a token is cut.
    before = p.cumsum(-1).sub_(p)
    limit = torch.tensor(top_p, dtype=torch.float64, device=scores.device)[:, None]
    kept = (before < limit).sum(-1, keepdim=True).clamp_min_(1)
    last = best.gather(1, kept - 1)
    first_cut = best.gather(1, kept.clamp_max(best.shape[1] - 1))
    clear = ((before - limit).abs() > _CLEAR).all(-1) & (first_cut < last)[:, 0]
    for r, is_clear in enumerate(clear.tolist()):
        if is_clear:
            scores[r].masked_fill_(scores[r] < last[r], _NEVER)
        else:
            _keep_top_p_of_all(scores[r], top_p[r])


def _keep_top_p_of_all(score: torch.Tensor, top_p: float) -> None:
    # Ascending and stable, so that ties fall the same way in every batch.
    ordered, order = score.sort(stable=True)
    cut = ordered.softmax(0).cumsum(0) <= 1.0 - top_p
    cut[-1] = False
    score.masked_fill_(torch.zeros_like(cut).scatter_(0, order, cut), _NEVER)


def _keep_min_p(scores: torch.Tensor, min_p: list[float]) -> None:
    """Cut what is less likely than min_p times the best."""
    p = scores.softmax(-1)
    share = torch.tensor(min_p, dtype=torch.float64, device=scores.device)[:, None]
    scores.masked_fill_(p < share * p.amax(-1, keepdim=True), _NEVER)


def _last(row: Row, count: int) -> list[int]:
    """The last `count` tokens before the one that is chosen."""
    drafted = row.drafted[max(len(row.drafted) - count, 0) :]
    missing = count - len(drafted)
    return [*row.committed[len(row.committed) - missing :], *drafted]


def _index(
    ids: Counter[int] | set[int] | frozenset[int] | Sequence[int], like: torch.Tensor
) -> torch.Tensor:
    return torch.tensor(
        [token for token in ids if token < like.shape[0]], device=like.device, dtype=torch.long
    )
