"""Between coordinator and verify worker."""

from outrider import messages as m
from outrider.errors import InvalidRequestError
from outrider.pb.v1 import verify_pb2
from outrider.wire import shared


def decode_command_to_pb(value: m.DecodeCommand) -> verify_pb2.DecodeCommand:
    """To the wire."""
    pb = verify_pb2.DecodeCommand(session_id=value.session_id, epoch=value.epoch)
    match value:
        case m.StartSession():
            pb.start.CopyFrom(
                verify_pb2.StartSession(
                    token_ids=value.token_ids,
                    prompt_len=value.prompt_len,
                    sampling=shared.sampling_to_pb(value.sampling),
                    endings=verify_pb2.Endings(
                        max_new_tokens=value.endings.max_new_tokens,
                        stop_ids=sorted(value.endings.stop_ids),
                    ),
                    speculation=shared.speculation_to_pb(value.speculation),
                    drafter=shared.worker_to_pb(value.drafter),
                    traceparent=value.traceparent,
                    tenant=value.tenant,
                    logprobs=shared.logprob_options_to_pb(value.logprobs),
                )
            )
        case m.CloseSession():
            pb.close.SetInParent()
        case m.AssignDrafter():
            pb.assign.SetInParent()
            drafter = shared.worker_to_pb(value.drafter)
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
                sampling=shared.sampling_from_pb(start.sampling),
                endings=m.Endings(start.endings.max_new_tokens, frozenset(start.endings.stop_ids)),
                speculation=shared.speculation_from_pb(start.speculation),
                drafter=shared.worker_from_pb(start.drafter),
                traceparent=start.traceparent,
                tenant=start.tenant,
                logprobs=(
                    shared.logprob_options_from_pb(start.logprobs)
                    if start.HasField("logprobs")
                    else None
                ),
            )
        case "close":
            return m.CloseSession(session_id=pb.session_id, epoch=pb.epoch)
        case "assign":
            drafter = shared.worker_from_pb(pb.assign.drafter)
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
                    origins=[shared.TOKEN_ORIGINS[origin] for origin in value.origins],
                    draft_tokens=value.draft_tokens,
                    logprobs=[shared.logprobs_to_pb(entry) for entry in value.logprobs],
                    timings=shared.timings_to_pb(value.timings),
                    cached_tokens=value.cached_tokens,
                )
            )
        case m.SessionEnded():
            pb.ended.reason = shared.FINISH_REASONS[value.reason]
        case m.SessionFailed():
            pb.error.CopyFrom(shared.error_to_pb(value.error))
        case m.DrafterLost():
            pb.drafter_lost.worker_id = value.worker_id
            pb.drafter_lost.error.CopyFrom(shared.error_to_pb(value.error))
    return pb


def decode_event_from_pb(pb: verify_pb2.DecodeEvent) -> m.DecodeEvent:
    """From the wire."""
    sid, epoch = pb.session_id, pb.epoch
    match pb.WhichOneof("event"):
        case "progress":
            origins = tuple(
                shared.known(shared.TOKEN_ORIGINS_FROM_PB, origin, "token origin")
                for origin in pb.progress.origins
            )
            if len(origins) != len(pb.progress.token_ids):
                raise InvalidRequestError("progress has as many origins as tokens, or is wrong")
            logprobs = tuple(shared.logprobs_from_pb(entry) for entry in pb.progress.logprobs)
            if logprobs and len(logprobs) != len(origins):
                raise InvalidRequestError("progress has as many logprobs as tokens, or none")
            return m.Progress(
                session_id=sid,
                epoch=epoch,
                base_len=pb.progress.base_len,
                token_ids=tuple(pb.progress.token_ids),
                origins=origins,
                draft_tokens=pb.progress.draft_tokens,
                logprobs=logprobs,
                timings=shared.timings_from_pb(pb.progress.timings),
                cached_tokens=pb.progress.cached_tokens,
            )
        case "ended":
            reason = shared.known(shared.FINISH_REASONS_FROM_PB, pb.ended.reason, "finish reason")
            return m.SessionEnded(session_id=sid, epoch=epoch, reason=reason)
        case "error":
            return m.SessionFailed(
                session_id=sid, epoch=epoch, error=shared.error_from_pb(pb.error)
            )
        case "drafter_lost":
            return m.DrafterLost(
                session_id=sid,
                epoch=epoch,
                worker_id=pb.drafter_lost.worker_id,
                error=shared.error_from_pb(pb.drafter_lost.error),
            )
        case _:
            raise InvalidRequestError("decode event without an event")


def heartbeat_to_pb(value: m.Heartbeat) -> verify_pb2.Heartbeat:
    """To the wire."""
    return verify_pb2.Heartbeat(silent_ms=value.silent_ms, draining=value.draining)


def heartbeat_from_pb(pb: verify_pb2.Heartbeat) -> m.Heartbeat:
    """From the wire."""
    return m.Heartbeat(pb.silent_ms, pb.draining)
