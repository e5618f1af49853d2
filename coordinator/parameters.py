"""The sampling parameters of a request: what is refused, and the defaults."""

import math
import secrets
from collections.abc import Iterable

from coordinator.model import ServedModel
from outrider.errors import InvalidRequestError
from outrider.messages import LogprobOptions, SamplingParams
from outrider.pb.v1 import coordinator_pb2

MAX_LOGIT_BIASES = 1024
# As good as infinite, and no sum with logits or quotient by a penalty overflows.
MAX_BIAS = 1e30
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 32
# No text of so few tokens is longer, and a longer one is not worth the time to tokenize it.
MAX_BAD_WORD_CHARS = 2048
REPETITION_PENALTIES = (1e-3, 1e3)
MAX_COUNT_PENALTY = 2.0
MAX_TOP_LOGPROBS = 20


def read_sampling(
    request: coordinator_pb2.GenerateRequest,
    model: ServedModel,
    *,
    stop_ids: frozenset[int],
    max_new_tokens: int,
) -> SamplingParams:
    """The parameters with their defaults filled in: greedy, every token kept.

    `stop_ids` are those that end the completion, `max_new_tokens` what there is room for.
    Padding ids are left out.

    Raises:
        InvalidRequestError: one is out of range, or together they leave no token.
    """
    temperature = request.temperature if request.HasField("temperature") else 0.0
    top_p = request.top_p if request.HasField("top_p") else 1.0
    if not (math.isfinite(temperature) and temperature >= 0):
        raise InvalidRequestError(f"temperature must be a number from 0 up, not {temperature}")
    if not 0 < top_p <= 1:
        raise InvalidRequestError(f"top_p must be above 0 and at most 1, not {top_p}")
    if not 0 <= request.min_p <= 1:
        raise InvalidRequestError(f"min_p must be from 0 to 1, not {request.min_p}")
    if request.min_tokens > max_new_tokens:
        raise InvalidRequestError(
            f"min_tokens {request.min_tokens} is more than the {max_new_tokens} tokens that "
            "max_tokens and the context leave room for"
        )
    sampling = SamplingParams(
        temperature=temperature,
        top_k=request.top_k,
        top_p=top_p,
        seed=request.seed if request.HasField("seed") else secrets.randbits(64),
        min_p=request.min_p,
        repetition_penalty=_repetition_penalty(request),
        frequency_penalty=_count_penalty("frequency_penalty", request.frequency_penalty),
        presence_penalty=_count_penalty("presence_penalty", request.presence_penalty),
        logit_bias=_logit_bias(request, model),
        bad_words=_bad_words(request, model),
        min_tokens=request.min_tokens,
        allowed_ids=_producible("allowed_token_ids", request.allowed_token_ids, model),
        banned_ids=_producible("banned_token_ids", request.banned_token_ids, model),
    )
    _check_something_is_left(sampling, request, model, stop_ids)
    return sampling


def read_logprobs(
    request: coordinator_pb2.GenerateRequest, model: ServedModel
) -> LogprobOptions | None:
    """The log-probabilities that are wanted; None for none.

    Raises:
        InvalidRequestError: too many at a token.
    """
    if not request.HasField("logprobs"):
        return None
    if request.logprobs.top > MAX_TOP_LOGPROBS:
        raise InvalidRequestError(
            f"at most {MAX_TOP_LOGPROBS} top logprobs are given, not {request.logprobs.top}"
        )
    return LogprobOptions(min(request.logprobs.top, model.token_count), request.logprobs.processed)


def check_ids(
    what: str, token_ids: Iterable[int], model: ServedModel, *, padding: bool = False
) -> None:
    """Refuse ids outside the vocabulary with an `InvalidRequestError`.

    `padding` takes the ids that only the embeddings have too; they never come out anyway.
    """
    size = model.vocab_size if padding else model.token_count
    for token_id in token_ids:
        if token_id >= size:
            raise InvalidRequestError(
                f"{what}: {token_id} is not within the vocabulary of {size} tokens"
            )


def _repetition_penalty(request: coordinator_pb2.GenerateRequest) -> float:
    if not request.HasField("repetition_penalty"):
        return 1.0
    low, high = REPETITION_PENALTIES
    if not low <= request.repetition_penalty <= high:
        raise InvalidRequestError(
            f"repetition_penalty must be from {low:g} to {high:g} (1 is off), "
            f"not {request.repetition_penalty}"
        )
    return request.repetition_penalty


def _count_penalty(name: str, value: float) -> float:
    if not -MAX_COUNT_PENALTY <= value <= MAX_COUNT_PENALTY:
        raise InvalidRequestError(
            f"{name} must be from -{MAX_COUNT_PENALTY:g} to {MAX_COUNT_PENALTY:g}, not {value}"
        )
    return value


def _logit_bias(
    request: coordinator_pb2.GenerateRequest, model: ServedModel
) -> tuple[tuple[int, float], ...]:
    if len(request.logit_bias) > MAX_LOGIT_BIASES:
        raise InvalidRequestError(
            f"at most {MAX_LOGIT_BIASES} logit biases are taken, not {len(request.logit_bias)}"
        )
    check_ids("logit_bias", (entry.token_id for entry in request.logit_bias), model, padding=True)
    biases: dict[int, float] = {}
    for entry in request.logit_bias:
        if not abs(entry.bias) <= MAX_BIAS:
            raise InvalidRequestError(
                f"logit_bias of token {entry.token_id} must be a finite number of at most "
                f"{MAX_BIAS:g}, not {entry.bias}; to bar a token, use banned_token_ids"
            )
        if entry.token_id in biases:
            raise InvalidRequestError(f"logit_bias names token {entry.token_id} twice")
        biases[entry.token_id] = entry.bias
    return tuple((token, bias) for token, bias in biases.items() if token < model.token_count)


def _bad_words(
    request: coordinator_pb2.GenerateRequest, model: ServedModel
) -> tuple[tuple[int, ...], ...]:
    """Id sequences, each once; a text stands for itself and for itself after a space."""
    given = len(request.bad_words) + len(request.bad_words_ids)
    if given > MAX_BAD_WORDS:
        raise InvalidRequestError(f"at most {MAX_BAD_WORDS} bad words are taken, not {given}")
    words: list[tuple[int, ...]] = []
    for text in request.bad_words:
        if not text or len(text) > MAX_BAD_WORD_CHARS:
            raise InvalidRequestError(
                f"a bad word has 1 to {MAX_BAD_WORD_CHARS} characters, not {len(text)}"
            )
        words += [model.encode_plain(text), model.encode_plain(f" {text}")]
    for sequence in request.bad_words_ids:
        check_ids("bad_words_ids", sequence.ids, model, padding=True)
        words.append(tuple(sequence.ids))
    for word in words:
        if not 0 < len(word) <= MAX_BAD_WORD_TOKENS:
            raise InvalidRequestError(
                f"a bad word has 1 to {MAX_BAD_WORD_TOKENS} tokens, not {len(word)}"
            )
    # One with a padding id can't occur.
    return tuple(word for word in dict.fromkeys(words) if max(word) < model.token_count)


def _producible(what: str, token_ids: Iterable[int], model: ServedModel) -> tuple[int, ...]:
    given = list(token_ids)
    check_ids(what, given, model, padding=True)
    return tuple(token for token in dict.fromkeys(given) if token < model.token_count)


def _check_something_is_left(
    sampling: SamplingParams,
    request: coordinator_pb2.GenerateRequest,
    model: ServedModel,
    stop_ids: frozenset[int],
) -> None:
    barred = set(sampling.banned_ids)
    barred.update(word[0] for word in sampling.bad_words if len(word) == 1)
    restricted = bool(request.allowed_token_ids)
    if not restricted and len(barred) + len(stop_ids) < model.token_count:
        return
    left = set(sampling.allowed_ids if restricted else range(model.token_count)) - barred
    if not left:
        raise InvalidRequestError(
            "allowed_token_ids less banned_token_ids and bad words leave no token to choose"
        )
    if sampling.min_tokens and left <= stop_ids:
        raise InvalidRequestError(
            f"only tokens that end the completion may be chosen, and min_tokens "
            f"{sampling.min_tokens} bars them at the beginning"
        )
