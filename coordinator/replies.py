"""What this coordinator answers, put into messages."""

from collections.abc import Sequence

from coordinator.commit import CommitStep, Piece
from coordinator.model import ServedModel
from coordinator.pool import WorkerPool
from outrider import wire
from outrider.messages import FinishReason
from outrider.pb.v1 import coordinator_pb2, types_pb2
from outrider.session.record import SessionRecord, SessionState
from outrider.session.registry import Pool, WorkerRecord

SESSION_STATES = {
    SessionState.RUNNING: coordinator_pb2.SESSION_STATE_RUNNING,
    SessionState.PAUSED: coordinator_pb2.SESSION_STATE_PAUSED,
    SessionState.FINISHED: coordinator_pb2.SESSION_STATE_FINISHED,
}


def started(record: SessionRecord, prompt: Sequence[int]) -> coordinator_pb2.GenerateResponse:
    """The first message of a call; `record` is that of its first sample."""
    message = coordinator_pb2.Started(
        session_id=record.session_id,
        model=record.model,
        seed=record.sampling.seed,
        prompt_tokens=record.prompt_len,
    )
    if record.prompt_text is not None:
        message.prompt_token_ids.extend(prompt)
        message.prompt_text = record.prompt_text
    return coordinator_pb2.GenerateResponse(started=message)


def delta(index: int, offset: int, pieces: list[Piece]) -> coordinator_pb2.GenerateResponse:
    """Committed tokens of sample `index`; `offset` counts its completion tokens before them."""
    return coordinator_pb2.GenerateResponse(
        delta=coordinator_pb2.Delta(
            index=index, offset=offset, pieces=[_piece(piece) for piece in pieces]
        )
    )


def _piece(piece: Piece) -> coordinator_pb2.Piece:
    return coordinator_pb2.Piece(
        token_id=piece.token_id,
        text=piece.text,
        origin=(
            wire.TOKEN_ORIGINS[piece.origin] if piece.origin else types_pb2.TOKEN_ORIGIN_UNSPECIFIED
        ),
        logprobs=wire.logprobs_to_pb(piece.logprobs) if piece.logprobs else None,
    )


def finished(
    index: int, commit: CommitStep, reason: FinishReason, *, first_token_s: float, total_s: float
) -> coordinator_pb2.GenerateResponse:
    """The last message of sample `index`; times count from the arrival of the request."""
    return coordinator_pb2.GenerateResponse(
        finished=coordinator_pb2.Finished(
            index=index,
            reason=wire.FINISH_REASONS[reason],
            text=commit.flush(),
            usage=coordinator_pb2.Usage(
                prompt_tokens=commit.limits.prompt_len,
                completion_tokens=len(commit.token_ids),
                cached_tokens=commit.cached_tokens,
            ),
            speculation=wire.figures_to_pb(commit.figures),
            timings=coordinator_pb2.GenerateTimings(
                first_token_us=round(first_token_s * 1e6), total_us=round(total_s * 1e6)
            ),
        )
    )


def session_info(record: SessionRecord, token_ids: list[int]) -> coordinator_pb2.SessionInfo:
    """A session; `token_ids` holds the prompt too."""
    reason = record.finish_reason
    return coordinator_pb2.SessionInfo(
        session_id=record.session_id,
        model=record.model,
        state=SESSION_STATES[record.state],
        finish_reason=(
            wire.FINISH_REASONS[reason] if reason else types_pb2.FINISH_REASON_UNSPECIFIED
        ),
        epoch=record.epoch,
        prompt_tokens=record.prompt_len,
        token_ids=token_ids[record.prompt_len :],
        verify_worker_id=record.verify_worker_id,
        draft_worker_id=record.draft_worker_id,
    )


def model_info(model: ServedModel) -> coordinator_pb2.ModelInfo:
    """A model that is served."""
    return coordinator_pb2.ModelInfo(
        name=model.name, fingerprint=model.fingerprint, context_len=model.context_len
    )


def worker_infos(pool: WorkerPool) -> list[coordinator_pb2.WorkerInfo]:
    """Every worker that is up, verify workers first."""
    infos = []
    for worker in pool.workers(Pool.VERIFY):
        link = pool.links.get(worker.worker_id)
        info = _worker_info(worker, link.sessions if link else 0)
        info.pool = coordinator_pb2.WORKER_POOL_VERIFY
        info.connected = link is not None and link.connected
        infos.append(info)
    for worker in pool.workers(Pool.DRAFT):
        info = _worker_info(worker, pool.drafted[worker.worker_id])
        info.pool = coordinator_pb2.WORKER_POOL_DRAFT
        infos.append(info)
    return infos


def _worker_info(worker: WorkerRecord, sessions: int) -> coordinator_pb2.WorkerInfo:
    return coordinator_pb2.WorkerInfo(
        worker_id=worker.worker_id,
        address=worker.address,
        incarnation=worker.incarnation,
        model=worker.model,
        sessions=sessions,
        capacity=worker.capacity,
        draining=worker.draining,
        dtype=worker.dtype,
        numerics=worker.numerics,
    )
