"""Log-probabilities of committed tokens, against a plain computation."""

import math

import pytest
import torch

from outrider.messages import LogprobOptions, SamplingParams, TokenLogprobs
from outrider.sampling.coupled import processed_scores
from outrider.sampling.logprobs import token_logprobs
from outrider.sampling.rows import Row

VOCAB_SIZE = 7
LOGITS = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(5)) * 2
COMMITTED = [3, 0, 6, 2]
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=1.5, logit_bias=((0, 2.0),), frequency_penalty=0.5),
    SamplingParams(repetition_penalty=2.0),
]
ROWS = [Row(sampling, [1, 2, 1], prompt_len=1) for sampling in SAMPLINGS]


def plain(scores: list[float], token: int, top: int) -> TokenLogprobs:
    """Log-probabilities in ordinary floats."""
    total = math.log(math.fsum(math.exp(score) for score in scores))
    best = sorted(range(len(scores)), key=lambda v: -scores[v])[:top]
    return TokenLogprobs(
        scores[token] - total,
        tuple((v, scores[v] - total) for v in best if scores[v] > -math.inf),
    )


def assert_close(found: tuple[TokenLogprobs, ...], expected: list[TokenLogprobs]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.logprob == pytest.approx(other.logprob, rel=1e-12, abs=1e-12)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert [v for _, v in one.top] == pytest.approx([v for _, v in other.top], rel=1e-12)


@pytest.mark.parametrize("top", [0, 1, 3, VOCAB_SIZE, VOCAB_SIZE + 4])
def test_raw_ones_are_of_the_logits_whatever_the_parameters(top: int) -> None:
    found = token_logprobs(LOGITS, ROWS, COMMITTED, LogprobOptions(top))
    rows = LOGITS.double().tolist()
    assert_close(found, [plain(row, t, top) for row, t in zip(rows, COMMITTED, strict=True)])


@pytest.mark.parametrize("top", [0, 2, VOCAB_SIZE])
def test_processed_ones_are_of_what_the_token_is_chosen_from(top: int) -> None:
    found = token_logprobs(LOGITS, ROWS, COMMITTED, LogprobOptions(top, processed=True))
    rows = processed_scores(LOGITS, ROWS).tolist()
    assert_close(found, [plain(row, t, top) for row, t in zip(rows, COMMITTED, strict=True)])
    # At temperature 0 without a processor, they are the raw ones.
    raw = token_logprobs(LOGITS, ROWS, COMMITTED, LogprobOptions(top))
    assert found[0].logprob == pytest.approx(raw[0].logprob, rel=1e-12)
    assert all(
        a.logprob != pytest.approx(b.logprob) for a, b in zip(found[1:], raw[1:], strict=True)
    )


def test_tokens_that_cannot_be_chosen_are_not_among_the_best() -> None:
    sampling = SamplingParams(temperature=1.0, allowed_ids=(2, 5), banned_ids=(0,))
    options = LogprobOptions(4, processed=True)
    (found,) = token_logprobs(LOGITS[:1], [Row(sampling, [1])], [5], options)
    assert {token for token, _ in found.top} == {2, 5}
    assert math.fsum(math.exp(v) for _, v in found.top) == pytest.approx(1.0)
    # One that was committed all the same has no chance at all.
    (barred,) = token_logprobs(LOGITS[:1], [Row(sampling, [1])], [0], options)
    assert barred.logprob == -math.inf


def test_there_is_a_token_for_each_row() -> None:
    with pytest.raises(ValueError, match="zip"):
        token_logprobs(LOGITS, ROWS, COMMITTED[:3], LogprobOptions())


def test_low_precision_is_widened_before_anything_is_computed() -> None:
    (found,) = token_logprobs(
        LOGITS[:1].bfloat16(), ROWS[:1], COMMITTED[:1], LogprobOptions(VOCAB_SIZE)
    )
    assert_close(
        (found,), [plain(LOGITS[0].bfloat16().double().tolist(), COMMITTED[0], VOCAB_SIZE)]
    )
