"""What several messages are made of."""

from typing import TypeVar

from google.rpc import code_pb2

from outrider import messages as m
from outrider.errors import InvalidRequestError, OutriderError, code_of, from_reason, shortened
from outrider.figures import SpeculationFigures
from outrider.pb.v1 import types_pb2

Key = TypeVar("Key")
Value = TypeVar("Value")


def _inverse(table: dict[Key, Value]) -> dict[Value, Key]:
    return {value: key for key, value in table.items()}


FINISH_REASONS = {
    m.FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    m.FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    m.FinishReason.CANCELLED: types_pb2.FINISH_REASON_CANCELLED,
    m.FinishReason.ERROR: types_pb2.FINISH_REASON_ERROR,
}
FINISH_REASONS_FROM_PB = _inverse(FINISH_REASONS)
TOKEN_ORIGINS = {
    m.TokenOrigin.PLAIN: types_pb2.TOKEN_ORIGIN_PLAIN,
    m.TokenOrigin.ACCEPTED: types_pb2.TOKEN_ORIGIN_ACCEPTED,
    m.TokenOrigin.RECOVERED: types_pb2.TOKEN_ORIGIN_RECOVERED,
    m.TokenOrigin.BONUS: types_pb2.TOKEN_ORIGIN_BONUS,
}
TOKEN_ORIGINS_FROM_PB = _inverse(TOKEN_ORIGINS)
RULES = {
    m.AcceptanceRule.COUPLED: types_pb2.ACCEPTANCE_RULE_COUPLED,
    m.AcceptanceRule.REJECTION: types_pb2.ACCEPTANCE_RULE_REJECTION,
}
RULES_FROM_PB = _inverse(RULES)
DTYPES = {
    "float32": types_pb2.TENSOR_DTYPE_FLOAT32,
    "bfloat16": types_pb2.TENSOR_DTYPE_BFLOAT16,
    "float16": types_pb2.TENSOR_DTYPE_FLOAT16,
}
DTYPES_FROM_PB = _inverse(DTYPES)
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# More would only make their product expensive.
MAX_DIMENSIONS = 8


def known(table: dict[Key, Value], key: Key, what: str) -> Value:
    """The value of a key; raises `InvalidRequestError` for one that is not in the table."""
    if key not in table:
        raise InvalidRequestError(f"unknown {what} {key!r} on the wire")
    return table[key]


def sampling_to_pb(value: m.SamplingParams) -> types_pb2.SamplingParams:
    """To the wire."""
    return types_pb2.SamplingParams(
        temperature=value.temperature,
        top_k=value.top_k,
        top_p=value.top_p,
        seed=value.seed,
        min_p=value.min_p,
        repetition_penalty=value.repetition_penalty,
        frequency_penalty=value.frequency_penalty,
        presence_penalty=value.presence_penalty,
        logit_bias=[types_pb2.LogitBias(token_id=i, bias=bias) for i, bias in value.logit_bias],
        bad_words=[types_pb2.TokenIds(ids=word) for word in value.bad_words],
        min_tokens=value.min_tokens,
        allowed_ids=value.allowed_ids,
        banned_ids=value.banned_ids,
    )


def sampling_from_pb(pb: types_pb2.SamplingParams) -> m.SamplingParams:
    """From the wire."""
    has_penalty = pb.HasField("repetition_penalty")
    return m.SamplingParams(
        temperature=pb.temperature,
        top_k=pb.top_k,
        top_p=pb.top_p if pb.HasField("top_p") else 1.0,
        seed=pb.seed,
        min_p=pb.min_p,
        repetition_penalty=pb.repetition_penalty if has_penalty else 1.0,
        frequency_penalty=pb.frequency_penalty,
        presence_penalty=pb.presence_penalty,
        logit_bias=tuple((entry.token_id, entry.bias) for entry in pb.logit_bias),
        bad_words=tuple(tuple(word.ids) for word in pb.bad_words),
        min_tokens=pb.min_tokens,
        allowed_ids=tuple(pb.allowed_ids),
        banned_ids=tuple(pb.banned_ids),
    )


def rule_from_pb(pb: "types_pb2.AcceptanceRule.ValueType") -> m.AcceptanceRule:
    """From the wire; an unspecified rule is the coupled one."""
    if pb == types_pb2.ACCEPTANCE_RULE_UNSPECIFIED:
        return m.AcceptanceRule.COUPLED
    return known(RULES_FROM_PB, pb, "acceptance rule")


def speculation_to_pb(value: m.SpeculationOptions) -> types_pb2.SpeculationOptions:
    """To the wire."""
    mode = types_pb2.SPECULATION_MODE_ON if value.enabled else types_pb2.SPECULATION_MODE_OFF
    rule = RULES[value.rule]
    return types_pb2.SpeculationOptions(
        mode=mode, draft_len=value.draft_len, rule=rule, auto_draft_len=value.auto_draft_len
    )


def speculation_from_pb(pb: types_pb2.SpeculationOptions) -> m.SpeculationOptions:
    """From the wire; an unspecified mode is on."""
    enabled = pb.mode != types_pb2.SPECULATION_MODE_OFF
    rule = rule_from_pb(pb.rule)
    return m.SpeculationOptions(enabled, pb.draft_len, rule, pb.auto_draft_len)


def logprob_options_to_pb(value: m.LogprobOptions | None) -> types_pb2.LogprobOptions | None:
    """To the wire; None where none are wanted."""
    if value is None:
        return None
    return types_pb2.LogprobOptions(top=value.top, processed=value.processed)


def logprob_options_from_pb(pb: types_pb2.LogprobOptions) -> m.LogprobOptions:
    """From the wire."""
    return m.LogprobOptions(pb.top, pb.processed)


def logprobs_to_pb(value: m.TokenLogprobs) -> types_pb2.TokenLogprobs:
    """To the wire."""
    top = [types_pb2.TokenLogprob(token_id=i, logprob=logprob) for i, logprob in value.top]
    return types_pb2.TokenLogprobs(logprob=value.logprob, top=top)


def logprobs_from_pb(pb: types_pb2.TokenLogprobs) -> m.TokenLogprobs:
    """From the wire."""
    return m.TokenLogprobs(pb.logprob, tuple((entry.token_id, entry.logprob) for entry in pb.top))


def figures_to_pb(value: SpeculationFigures) -> types_pb2.SpeculationFigures:
    """To the wire."""
    return types_pb2.SpeculationFigures(
        rounds=value.rounds,
        drafts=value.drafts,
        draft_tokens=value.draft_tokens,
        accepted_tokens=value.accepted_tokens,
        accepted_per_position=value.accepted_per_position,
    )


def figures_from_pb(pb: types_pb2.SpeculationFigures) -> SpeculationFigures:
    """From the wire."""
    return SpeculationFigures(
        pb.rounds,
        pb.drafts,
        pb.draft_tokens,
        pb.accepted_tokens,
        list(pb.accepted_per_position),
    )


def draft_to_pb(value: m.Draft) -> types_pb2.Draft:
    """To the wire."""
    q = [types_pb2.SparseDistribution(token_ids=d.token_ids, weights=d.weights) for d in value.q]
    return types_pb2.Draft(
        token_ids=value.token_ids, parents=value.parents, q=q, priced=value.priced
    )


def draft_from_pb(pb: types_pb2.Draft) -> m.Draft:
    """From the wire; refuses shapes that do not fit, not ids that do not exist."""
    tokens, parents = tuple(pb.token_ids), tuple(pb.parents)
    if parents and len(parents) != len(tokens):
        raise InvalidRequestError(f"draft has {len(tokens)} tokens but {len(parents)} parents")
    if any(not -1 <= parent < i for i, parent in enumerate(parents)):
        raise InvalidRequestError("draft has a parent that does not come before its child")
    if pb.q and len(pb.q) != len(tokens):
        raise InvalidRequestError(f"draft has {len(tokens)} tokens but {len(pb.q)} distributions")
    if any(len(d.token_ids) != len(d.weights) for d in pb.q):
        raise InvalidRequestError("a draft distribution has as many weights as ids, or is wrong")
    q = tuple(m.SparseDistribution(tuple(d.token_ids), tuple(d.weights)) for d in pb.q)
    return m.Draft(tokens, parents, q, pb.priced)


def tensor_to_pb(value: m.Tensor) -> types_pb2.Tensor:
    """To the wire."""
    return types_pb2.Tensor(dtype=DTYPES[value.dtype], shape=value.shape, data=value.data)


def tensor_from_pb(pb: types_pb2.Tensor) -> m.Tensor:
    """From the wire; refuses data whose length is not that of dtype and shape."""
    dtype = known(DTYPES_FROM_PB, pb.dtype, "tensor dtype")
    if len(pb.shape) > MAX_DIMENSIONS:
        raise InvalidRequestError(f"a tensor has {len(pb.shape)} dimensions, which is too many")
    expected = DTYPE_BYTES[dtype]
    for size in pb.shape:
        expected *= size
    if len(pb.data) != expected:
        raise InvalidRequestError(
            f"tensor {dtype}{list(pb.shape)} needs {expected} bytes, got {len(pb.data)}"
        )
    return m.Tensor(dtype, tuple(pb.shape), pb.data)


def timings_to_pb(value: m.Timings) -> types_pb2.Timings:
    """To the wire."""
    return types_pb2.Timings(
        queue_us=value.queue_us, compute_us=value.compute_us, batch_sessions=value.batch_sessions
    )


def timings_from_pb(pb: types_pb2.Timings) -> m.Timings:
    """From the wire."""
    return m.Timings(pb.queue_us, pb.compute_us, pb.batch_sessions)


def error_to_pb(error: OutriderError) -> types_pb2.ItemError:
    """To the wire."""
    code: int = error.code.value[0]
    message = shortened(error.message)
    return types_pb2.ItemError(code=code, reason=error.reason, message=message)


def error_from_pb(pb: types_pb2.ItemError) -> OutriderError:
    """From the wire."""
    message = shortened(pb.message) or code_pb2.Code.Name(code_pb2.UNKNOWN)
    return from_reason(pb.reason, message, code_of(pb.code))


def worker_to_pb(value: m.DraftWorkerRef | None) -> types_pb2.DraftWorkerRef | None:
    """To the wire; None is left out."""
    if value is None:
        return None
    return types_pb2.DraftWorkerRef(
        worker_id=value.worker_id, address=value.address, trusted=value.trusted
    )


def worker_from_pb(pb: types_pb2.DraftWorkerRef) -> m.DraftWorkerRef | None:
    """From the wire; one without an id is none."""
    return m.DraftWorkerRef(pb.worker_id, pb.address, pb.trusted) if pb.worker_id else None
