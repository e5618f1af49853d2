"""What a request may ask of the sampler, and what reaches the worker."""

import math
from typing import Any

import pytest

from coordinator.parameters import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_TOP_LOGPROBS,
    read_logprobs,
    read_sampling,
)
from outrider.errors import InvalidRequestError
from outrider.messages import LogprobOptions, SamplingParams
from outrider.pb.v1 import coordinator_pb2 as pb
from outrider.pb.v1 import types_pb2
from tests.support.coordinator_stack import EOS, MODEL, token_ids

PADDING = MODEL.token_count
LAST = MODEL.vocab_size - 1


def ids(*token_ids: int) -> types_pb2.TokenIds:
    return types_pb2.TokenIds(ids=token_ids)


def bias(token_id: int, value: float) -> types_pb2.LogitBias:
    return types_pb2.LogitBias(token_id=token_id, bias=value)


def read(
    stop_ids: frozenset[int] = MODEL.stop_ids, max_new_tokens: int = 60, **fields: Any
) -> SamplingParams:
    request = pb.GenerateRequest(**{"seed": 7, **fields})
    return read_sampling(request, MODEL, stop_ids=stop_ids, max_new_tokens=max_new_tokens)


def test_what_is_left_out_does_nothing() -> None:
    assert read() == SamplingParams(seed=7)
    drawn = {
        read_sampling(pb.GenerateRequest(), MODEL, stop_ids=frozenset(), max_new_tokens=1).seed
        for _ in range(20)
    }
    assert len(drawn) == 20


def test_everything_is_passed_on() -> None:
    assert read(
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        seed=2**64 - 1,
        min_p=0.05,
        repetition_penalty=1.25,
        frequency_penalty=-2,
        presence_penalty=2,
        logit_bias=[bias(5, -100), bias(6, 1e30)],
        bad_words_ids=[ids(1, 2), ids(3)],
        min_tokens=60,
        allowed_token_ids=[4, 5, 6, 5],
        banned_token_ids=[6],
    ) == SamplingParams(
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        seed=2**64 - 1,
        min_p=0.05,
        repetition_penalty=1.25,
        frequency_penalty=-2.0,
        presence_penalty=2.0,
        logit_bias=((5, -100.0), (6, 1e30)),
        bad_words=((1, 2), (3,)),
        min_tokens=60,
        allowed_ids=(4, 5, 6),
        banned_ids=(6,),
    )


def test_a_bad_word_stands_for_itself_and_for_itself_after_a_space() -> None:
    word, spaced = tuple(token_ids("no")), tuple(token_ids(" no"))
    assert read(bad_words=["no"]).bad_words == (word, spaced)
    assert read(bad_words=["no"], bad_words_ids=[ids(*spaced), ids(9)]).bad_words == (
        word,
        spaced,
        (9,),
    )


def test_padding_ids_are_left_out_as_they_never_come_out() -> None:
    found = read(
        logit_bias=[bias(PADDING, 5), bias(1, 5)],
        bad_words_ids=[ids(1, LAST), ids(1, 2)],
        allowed_token_ids=[PADDING, 8],
        banned_token_ids=[LAST, 9],
    )
    assert found.logit_bias == ((1, 5.0),)
    assert found.bad_words == ((1, 2),)
    assert (found.allowed_ids, found.banned_ids) == ((8,), (9,))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"min_p": math.nan}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": -1}, "repetition_penalty"),
        ({"repetition_penalty": math.inf}, "repetition_penalty"),
        ({"repetition_penalty": math.nan}, "repetition_penalty"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"),
        ({"presence_penalty": -2.5}, "presence_penalty"),
        ({"logit_bias": [bias(5, math.inf)]}, "logit_bias of token 5.*banned_token_ids"),
        ({"logit_bias": [bias(5, -math.inf)]}, "logit_bias of token 5"),
        ({"logit_bias": [bias(5, math.nan)]}, "logit_bias of token 5"),
        ({"logit_bias": [bias(5, 1), bias(5, 2)]}, "token 5 twice"),
        ({"logit_bias": [bias(300, 1)]}, "logit_bias: 300 is not within.* 300 tokens"),
        ({"logit_bias": [bias(1, 0)] * (MAX_LOGIT_BIASES + 1)}, "at most 1024"),
        ({"bad_words": [""]}, "a bad word"),
        ({"bad_words": ["x" * MAX_BAD_WORD_TOKENS]}, "32 tokens, not 33"),
        ({"bad_words": ["x" * (MAX_BAD_WORD_CHARS + 1)]}, "2048 characters"),
        ({"bad_words_ids": [ids()]}, "tokens, not 0"),
        ({"bad_words_ids": [ids(*[1] * (MAX_BAD_WORD_TOKENS + 1))]}, "tokens, not 33"),
        ({"bad_words_ids": [ids(1, 300)]}, "bad_words_ids: 300"),
        ({"bad_words": ["x"], "bad_words_ids": [ids(1)] * MAX_BAD_WORDS}, "at most 256"),
        ({"min_tokens": 61}, "min_tokens 61 is more than the 60"),
        ({"allowed_token_ids": [300]}, "allowed_token_ids: 300"),
        ({"banned_token_ids": [300]}, "banned_token_ids: 300"),
        ({"allowed_token_ids": [1, 2], "banned_token_ids": [2, 1]}, "leave no token"),
        ({"allowed_token_ids": [1], "bad_words_ids": [ids(1)]}, "leave no token"),
        ({"allowed_token_ids": [PADDING]}, "leave no token"),
        ({"banned_token_ids": range(MODEL.token_count)}, "leave no token"),
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, "min_tokens 1 bars them"),
        ({"banned_token_ids": range(EOS), "min_tokens": 1}, "min_tokens 1 bars them"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        read(**fields)


def test_the_limits_themselves_are_taken() -> None:
    assert read(min_p=1).min_p == 1
    assert len(read(logit_bias=[bias(i, 1) for i in range(257)]).logit_bias) == 257
    assert len(read(bad_words_ids=[ids(i) for i in range(256)]).bad_words) == 256
    assert read(bad_words=["x" * (MAX_BAD_WORD_TOKENS - 1)]).bad_words
    assert read(allowed_token_ids=[EOS]).allowed_ids == (EOS,)
    free = read(stop_ids=frozenset(), allowed_token_ids=[EOS], min_tokens=5)
    assert free.min_tokens == 5


def test_logprobs() -> None:
    def read(**fields: Any) -> LogprobOptions | None:
        return read_logprobs(pb.GenerateRequest(**fields), MODEL)

    assert read() is None
    assert read(logprobs=types_pb2.LogprobOptions()) == LogprobOptions(0, processed=False)
    most = types_pb2.LogprobOptions(top=MAX_TOP_LOGPROBS, processed=True)
    assert read(logprobs=most) == LogprobOptions(20, processed=True)
    with pytest.raises(InvalidRequestError, match=r"at most 20.*not 21"):
        read(logprobs=types_pb2.LogprobOptions(top=21))
