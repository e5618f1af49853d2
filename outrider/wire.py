"""Messages on the wire to plain values and back; the only module that knows both.

`*_to_pb` never fail. `*_from_pb` raise `InvalidRequestError` for what can't be a message of
ours; whether a well-formed message makes sense for a session is the receiver's to judge.
"""

from typing import TypeVar

from google.rpc import code_pb2

from outrider import messages as m
from outrider.errors import InvalidRequestError, OutriderError, code_of, from_reason
from outrider.pb.v1 import draft_pb2, types_pb2, verify_pb2

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
DTYPES = {
    "float32": types_pb2.TENSOR_DTYPE_FLOAT32,
    "bfloat16": types_pb2.TENSOR_DTYPE_BFLOAT16,
    "float16": types_pb2.TENSOR_DTYPE_FLOAT16,
}
DTYPES_FROM_PB = _inverse(DTYPES)
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def _known(table: dict[Key, Value], key: Key, what: str) -> Value:
    if key not in table:
        raise InvalidRequestError(f"unknown {what} {key!r} on the wire")
    return table[key]


# --- shared parts -------------------------------------------------------------------------


def sampling_to_pb(value: m.SamplingParams) -> types_pb2.SamplingParams:
    """To the wire."""
    return types_pb2.SamplingParams(
        temperature=value.temperature, top_k=value.top_k, top_p=value.top_p, seed=value.seed
    )


def sampling_from_pb(pb: types_pb2.SamplingParams) -> m.SamplingParams:
    """From the wire."""
    return m.SamplingParams(pb.temperature, pb.top_k, pb.top_p, pb.seed)


def speculation_to_pb(value: m.SpeculationOptions) -> types_pb2.SpeculationOptions:
    """To the wire."""
    mode = types_pb2.SPECULATION_MODE_ON if value.enabled else types_pb2.SPECULATION_MODE_OFF
    return types_pb2.SpeculationOptions(mode=mode, draft_len=value.draft_len)


def speculation_from_pb(pb: types_pb2.SpeculationOptions) -> m.SpeculationOptions:
    """From the wire; an unspecified mode is on."""
    return m.SpeculationOptions(pb.mode != types_pb2.SPECULATION_MODE_OFF, pb.draft_len)


def figures_to_pb(value: m.SpeculationFigures) -> types_pb2.SpeculationFigures:
    """To the wire."""
    return types_pb2.SpeculationFigures(
        rounds=value.rounds,
        drafts=value.drafts,
        draft_tokens=value.draft_tokens,
        accepted_tokens=value.accepted_tokens,
        accepted_per_position=value.accepted_per_position,
    )


def figures_from_pb(pb: types_pb2.SpeculationFigures) -> m.SpeculationFigures:
    """From the wire."""
    return m.SpeculationFigures(
        pb.rounds,
        pb.drafts,
        pb.draft_tokens,
        pb.accepted_tokens,
        list(pb.accepted_per_position),
    )


def draft_to_pb(value: m.Draft) -> types_pb2.Draft:
    """To the wire."""
    q = [types_pb2.SparseDistribution(token_ids=d.token_ids, weights=d.weights) for d in value.q]
    return types_pb2.Draft(token_ids=value.token_ids, parents=value.parents, q=q)


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
    return m.Draft(tokens, parents, q)


def tensor_to_pb(value: m.Tensor) -> types_pb2.Tensor:
    """To the wire."""
    return types_pb2.Tensor(dtype=DTYPES[value.dtype], shape=value.shape, data=value.data)


def tensor_from_pb(pb: types_pb2.Tensor) -> m.Tensor:
    """From the wire; refuses data whose length is not that of dtype and shape."""
    dtype = _known(DTYPES_FROM_PB, pb.dtype, "tensor dtype")
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
    return types_pb2.ItemError(code=code, reason=error.reason, message=error.message)


def error_from_pb(pb: types_pb2.ItemError) -> OutriderError:
    """From the wire."""
    return from_reason(
        pb.reason, pb.message or code_pb2.Code.Name(code_pb2.UNKNOWN), code_of(pb.code)
    )


def _worker_to_pb(value: m.DraftWorkerRef | None) -> types_pb2.DraftWorkerRef | None:
    if value is None:
        return None
    return types_pb2.DraftWorkerRef(worker_id=value.worker_id, address=value.address)


def _worker_from_pb(pb: types_pb2.DraftWorkerRef) -> m.DraftWorkerRef | None:
    return m.DraftWorkerRef(pb.worker_id, pb.address) if pb.worker_id else None


# --- coordinator <-> verify worker --------------------------------------------------------


def decode_command_to_pb(value: m.DecodeCommand) -> verify_pb2.DecodeCommand:
    """To the wire."""
    pb = verify_pb2.DecodeCommand(session_id=value.session_id, epoch=value.epoch)
    match value:
        case m.StartSession():
            pb.start.CopyFrom(
                verify_pb2.StartSession(
                    token_ids=value.token_ids,
                    prompt_len=value.prompt_len,
                    sampling=sampling_to_pb(value.sampling),
                    endings=verify_pb2.Endings(
                        max_new_tokens=value.endings.max_new_tokens,
                        stop_ids=sorted(value.endings.stop_ids),
                    ),
                    speculation=speculation_to_pb(value.speculation),
                    drafter=_worker_to_pb(value.drafter),
                    traceparent=value.traceparent,
                )
            )
        case m.CloseSession():
            pb.close.SetInParent()
        case m.AssignDrafter():
            pb.assign.SetInParent()
            drafter = _worker_to_pb(value.drafter)
            if drafter is not None:
                pb.assign.drafter.CopyFrom(drafter)
    return pb


def decode_command_from_pb(pb: verify_pb2.DecodeCommand) -> m.DecodeCommand:
    """From the wire."""
    match pb.WhichOneof("command"):
        case "start":
            start = pb.start
            if not 0 < start.prompt_len <= len(start.token_ids):
                raise InvalidRequestError(
                    f"prompt_len {start.prompt_len} is not within the "
                    f"{len(start.token_ids)} committed tokens"
                )
            return m.StartSession(
                session_id=pb.session_id,
                epoch=pb.epoch,
                token_ids=tuple(start.token_ids),
                prompt_len=start.prompt_len,
                sampling=sampling_from_pb(start.sampling),
                endings=m.Endings(start.endings.max_new_tokens, frozenset(start.endings.stop_ids)),
                speculation=speculation_from_pb(start.speculation),
                drafter=_worker_from_pb(start.drafter),
                traceparent=start.traceparent,
            )
        case "close":
            return m.CloseSession(session_id=pb.session_id, epoch=pb.epoch)
        case "assign":
            drafter = _worker_from_pb(pb.assign.drafter)
            return m.AssignDrafter(session_id=pb.session_id, epoch=pb.epoch, drafter=drafter)
        case _:
            raise InvalidRequestError("decode command without a command")


def decode_event_to_pb(value: m.DecodeEvent) -> verify_pb2.DecodeEvent:
    """To the wire."""
    pb = verify_pb2.DecodeEvent(session_id=value.session_id, epoch=value.epoch)
    match value:
        case m.Progress():
            pb.progress.CopyFrom(
                verify_pb2.Progress(
                    base_len=value.base_len,
                    token_ids=value.token_ids,
                    origins=[TOKEN_ORIGINS[origin] for origin in value.origins],
                    draft_tokens=value.draft_tokens,
                    timings=timings_to_pb(value.timings),
                )
            )
        case m.SessionEnded():
            pb.ended.reason = FINISH_REASONS[value.reason]
        case m.SessionFailed():
            pb.error.CopyFrom(error_to_pb(value.error))
        case m.DrafterLost():
            pb.drafter_lost.worker_id = value.worker_id
            pb.drafter_lost.error.CopyFrom(error_to_pb(value.error))
    return pb


def decode_event_from_pb(pb: verify_pb2.DecodeEvent) -> m.DecodeEvent:
    """From the wire."""
    sid, epoch = pb.session_id, pb.epoch
    match pb.WhichOneof("event"):
        case "progress":
            origins = tuple(
                _known(TOKEN_ORIGINS_FROM_PB, origin, "token origin")
                for origin in pb.progress.origins
            )
            if len(origins) != len(pb.progress.token_ids):
                raise InvalidRequestError("progress has as many origins as tokens, or is wrong")
            return m.Progress(
                session_id=sid,
                epoch=epoch,
                base_len=pb.progress.base_len,
                token_ids=tuple(pb.progress.token_ids),
                origins=origins,
                draft_tokens=pb.progress.draft_tokens,
                timings=timings_from_pb(pb.progress.timings),
            )
        case "ended":
            reason = _known(FINISH_REASONS_FROM_PB, pb.ended.reason, "finish reason")
            return m.SessionEnded(session_id=sid, epoch=epoch, reason=reason)
        case "error":
            return m.SessionFailed(session_id=sid, epoch=epoch, error=error_from_pb(pb.error))
        case "drafter_lost":
            return m.DrafterLost(
                session_id=sid,
                epoch=epoch,
                worker_id=pb.drafter_lost.worker_id,
                error=error_from_pb(pb.drafter_lost.error),
            )
        case _:
            raise InvalidRequestError("decode event without an event")


# --- verify worker <-> draft worker -------------------------------------------------------


def draft_command_to_pb(value: m.DraftCommand) -> draft_pb2.DraftCommand:
    """To the wire."""
    pb = draft_pb2.DraftCommand(session_id=value.session_id, epoch=value.epoch)
    match value:
        case m.OpenDraft():
            pb.open.CopyFrom(
                draft_pb2.OpenDraft(
                    token_ids=value.token_ids,
                    sampling=sampling_to_pb(value.sampling),
                    draft_len=value.draft_len,
                    traceparent=value.traceparent,
                )
            )
        case m.CommitDraft():
            layers = [
                types_pb2.LayerFeatures(layer=layer, hidden_states=tensor_to_pb(tensor))
                for layer, tensor in value.features
            ]
            pb.commit.CopyFrom(
                draft_pb2.CommitDraft(
                    base_len=value.base_len,
                    token_ids=value.token_ids,
                    draft_len=value.draft_len,
                    features=types_pb2.Features(layers=layers) if layers else None,
                )
            )
        case m.CloseDraft():
            pb.close.SetInParent()
    return pb


def draft_command_from_pb(pb: draft_pb2.DraftCommand) -> m.DraftCommand:
    """From the wire."""
    match pb.WhichOneof("command"):
        case "open":
            return m.OpenDraft(
                session_id=pb.session_id,
                epoch=pb.epoch,
                token_ids=tuple(pb.open.token_ids),
                sampling=sampling_from_pb(pb.open.sampling),
                draft_len=pb.open.draft_len,
                traceparent=pb.open.traceparent,
            )
        case "commit":
            features = tuple(
                (entry.layer, tensor_from_pb(entry.hidden_states))
                for entry in pb.commit.features.layers
            )
            return m.CommitDraft(
                session_id=pb.session_id,
                epoch=pb.epoch,
                base_len=pb.commit.base_len,
                token_ids=tuple(pb.commit.token_ids),
                draft_len=pb.commit.draft_len,
                features=features,
            )
        case "close":
            return m.CloseDraft(session_id=pb.session_id, epoch=pb.epoch)
        case _:
            raise InvalidRequestError("draft command without a command")


def draft_event_to_pb(value: m.DraftEvent) -> draft_pb2.DraftEvent:
    """To the wire."""
    pb = draft_pb2.DraftEvent(session_id=value.session_id, epoch=value.epoch)
    match value:
        case m.Proposal():
            pb.proposal.CopyFrom(
                draft_pb2.Proposal(
                    base_len=value.base_len,
                    draft=draft_to_pb(value.draft),
                    timings=timings_to_pb(value.timings),
                )
            )
        case m.DraftFailed():
            pb.error.CopyFrom(error_to_pb(value.error))
    return pb


def draft_event_from_pb(pb: draft_pb2.DraftEvent) -> m.DraftEvent:
    """From the wire."""
    match pb.WhichOneof("event"):
        case "proposal":
            return m.Proposal(
                session_id=pb.session_id,
                epoch=pb.epoch,
                base_len=pb.proposal.base_len,
                draft=draft_from_pb(pb.proposal.draft),
                timings=timings_from_pb(pb.proposal.timings),
            )
        case "error":
            error = error_from_pb(pb.error)
            return m.DraftFailed(session_id=pb.session_id, epoch=pb.epoch, error=error)
        case _:
            raise InvalidRequestError("draft event without an event")
