"""What transformers' own processors make of a row, in the order of its `generate`."""

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider.sampling.rows import Row


class CountPenalties(LogitsProcessor):
    """OpenAI's definition: c[v] times the frequency penalty, and once the presence penalty."""

    def __init__(self, prompt_len: int, frequency: float, presence: float) -> None:
        self.prompt_len = prompt_len
        self.frequency, self.presence = frequency, presence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for token in input_ids[0, self.prompt_len :].tolist():
            scores[0, token] -= self.frequency
        for token in set(input_ids[0, self.prompt_len :].tolist()):
            scores[0, token] -= self.presence
        return scores


def processors(row: Row) -> LogitsProcessorList:
    """The classes that do what the row's sampling parameters ask for."""
    s, chain = row.sampling, LogitsProcessorList()
    if s.logit_bias:
        chain.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in s.logit_bias]))
    if s.repetition_penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(s.repetition_penalty))
    if s.frequency_penalty or s.presence_penalty:
        chain.append(CountPenalties(row.prompt_len, s.frequency_penalty, s.presence_penalty))
    if s.bad_words:
        chain.append(NoBadWordsLogitsProcessor([list(word) for word in s.bad_words]))
    if s.min_tokens and row.stop_ids:
        chain.append(
            MinNewTokensLengthLogitsProcessor(row.prompt_len, s.min_tokens, sorted(row.stop_ids))
        )
    if s.allowed_ids:
        allowed = list(s.allowed_ids)
        chain.append(PrefixConstrainedLogitsProcessor(lambda batch, tokens: allowed, 1))
    if s.banned_ids:
        chain.append(SuppressTokensLogitsProcessor(s.banned_ids))
    if s.temperature > 0:
        chain.append(TemperatureLogitsWarper(s.temperature))
        if s.top_k:
            chain.append(TopKLogitsWarper(s.top_k))
        if s.top_p < 1:
            chain.append(TopPLogitsWarper(s.top_p))
        if s.min_p:
            chain.append(MinPLogitsWarper(s.min_p))
    return chain


def expected_scores(logits: torch.Tensor, row: Row) -> torch.Tensor:
    """Scores after all of them; float64 [V] to float64 [V]."""
    context = torch.LongTensor([[*row.committed, *row.drafted]])
    scores: torch.Tensor = processors(row)(context, logits[None])
    return scores[0]
