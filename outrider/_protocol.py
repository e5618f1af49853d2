"""The client's side of `coordinator.proto`, without any input or output.

Requests are built from keyword arguments; a `Transcript` folds the events of one `Generate`
call into chunks and the completion.
"""

from collections.abc import Mapping, Sequence
from typing import TypedDict

from outrider import wire
from outrider._values import (
    Chunk,
    Completion,
    GenerateTimings,
    ModelInfo,
    Piece,
    SessionInfo,
    Status,
    Usage,
    WorkerInfo,
)
from outrider.errors import InternalError, InvalidRequestError
from outrider.messages import FinishReason, SpeculationFigures, TokenOrigin
from outrider.pb.v1 import coordinator_pb2 as pb
from outrider.pb.v1 import types_pb2

MICROSECONDS = 1e6


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate`; what is left out is up to the server.

    messages, token_ids: instead of a text prompt; messages are rendered with the model's
        chat template (`{"role": "user", "content": "…"}`).
    max_tokens: most tokens to generate; up to the context limit when left out.
    temperature, top_p, top_k: temperature 0 (the default) is greedy, top_p 1 and top_k 0
        keep every token.
    seed: the same seed gives the same tokens; drawn by the server when left out.
    stop, stop_token_ids: strings and ids that end the completion and are not part of its text.
    speculation: False switches it off; a number is the draft length of each round.
    session_id: an id of your own; made when left out.
    model: the model's name, where more than one is served.
    timeout_s: seconds until the call fails with `DeadlineError`.
    """

    messages: Sequence[Mapping[str, str]]
    token_ids: Sequence[int]
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    speculation: bool | int | None
    session_id: str
    model: str
    timeout_s: float | None


def generate_request(
    prompt: str | None,
    *,
    session_id: str,
    messages: Sequence[Mapping[str, str]] | None = None,
    token_ids: Sequence[int] | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    seed: int | None = None,
    stop: str | Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    speculation: bool | int | None = None,
    model: str = "",
) -> pb.GenerateRequest:
    """The request that the options mean (see `GenerateOptions`).

    Raises:
        InvalidRequestError: not exactly one kind of prompt, or a value of the wrong kind.
    """
    if sum(given is not None for given in (prompt, messages, token_ids)) != 1:
        raise InvalidRequestError("give exactly one of prompt, messages and token_ids")
    try:
        request = pb.GenerateRequest(
            session_id=session_id,
            model=model,
            token_ids=None if token_ids is None else pb.TokenIds(ids=token_ids),
            messages=None if messages is None else _messages_to_pb(messages),
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop=[stop] if isinstance(stop, str) else stop,
            stop_token_ids=stop_token_ids,
            speculation=_speculation_to_pb(speculation),
        )
        if prompt is not None:
            request.text = prompt
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"bad argument of generate: {error}") from error
    return request


def _messages_to_pb(messages: Sequence[Mapping[str, str]]) -> pb.Messages:
    unknown = {key for message in messages for key in message} - {"role", "content"}
    missing = any({"role", "content"} - message.keys() for message in messages)
    if unknown or missing:
        raise InvalidRequestError("a message has a role and a content, and nothing else")
    return pb.Messages(
        messages=[pb.ChatMessage(role=m["role"], content=m["content"]) for m in messages]
    )


def _speculation_to_pb(speculation: bool | int | None) -> types_pb2.SpeculationOptions | None:
    if speculation is None:
        return None
    if not speculation:
        return types_pb2.SpeculationOptions(mode=types_pb2.SPECULATION_MODE_OFF)
    draft_len = 0 if speculation is True else speculation
    return types_pb2.SpeculationOptions(mode=types_pb2.SPECULATION_MODE_ON, draft_len=draft_len)


class Transcript:
    """What one `Generate` call has said so far; `begun` once it has said anything."""

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self._started = pb.Started()
        self._text: list[str] = []
        self._pieces: list[Piece] = []
        self._finished: pb.Finished | None = None
        self.begun = False

    @property
    def finished(self) -> bool:
        """Whether the coordinator has said how it ended."""
        return self._finished is not None

    def feed(self, response: pb.GenerateResponse) -> Chunk | None:
        """Take the next event; the chunk that it brought, if it brought any.

        Raises:
            InternalError: a delta is not the continuation of the one before.
        """
        self.begun = True
        match response.WhichOneof("event"):
            case "started":
                self._started = response.started
                self.session_id = response.started.session_id
                return None
            case "delta":
                return self._continue(response.delta)
            case "finished":
                self._finished = response.finished
                return self._chunk(response.finished.text, ()) if response.finished.text else None
            case _:  # an event of a newer coordinator
                return None

    def _continue(self, delta: pb.Delta) -> Chunk:
        if delta.offset != len(self._pieces):
            raise InternalError(
                f"session {self.session_id}: got tokens at {delta.offset}, "
                f"expected them at {len(self._pieces)}"
            )
        pieces = tuple(
            Piece(p.token_id, p.text, wire.TOKEN_ORIGINS_FROM_PB.get(p.origin, TokenOrigin.PLAIN))
            for p in delta.pieces
        )
        return self._chunk("".join(piece.text for piece in pieces), pieces)

    def _chunk(self, text: str, pieces: tuple[Piece, ...]) -> Chunk:
        chunk = Chunk(len(self._pieces), text, pieces)
        self._text.append(text)
        self._pieces.extend(pieces)
        return chunk

    def completion(self) -> Completion:
        """All of it; without a word on its end, it counts as cancelled by the caller."""
        end = self._finished
        reason = FinishReason.CANCELLED
        usage = Usage(self._started.prompt_tokens, len(self._pieces))
        figures, timings = SpeculationFigures(), GenerateTimings()
        if end is not None:
            reason = wire.FINISH_REASONS_FROM_PB.get(end.reason, FinishReason.ERROR)
            usage = Usage(end.usage.prompt_tokens, end.usage.completion_tokens)
            figures = wire.figures_from_pb(end.speculation)
            timings = GenerateTimings(
                end.timings.first_token_us / MICROSECONDS, end.timings.total_us / MICROSECONDS
            )
        return Completion(
            session_id=self.session_id,
            model=self._started.model,
            seed=self._started.seed,
            text="".join(self._text),
            pieces=tuple(self._pieces),
            finish_reason=reason,
            usage=usage,
            speculation=figures,
            timings=timings,
        )


def session_from_pb(info: pb.SessionInfo) -> SessionInfo:
    """From the wire."""
    return SessionInfo(
        session_id=info.session_id,
        model=info.model,
        running=info.state == pb.SESSION_STATE_RUNNING,
        finish_reason=wire.FINISH_REASONS_FROM_PB.get(info.finish_reason),
        epoch=info.epoch,
        prompt_tokens=info.prompt_tokens,
        token_ids=tuple(info.token_ids),
        verify_worker_id=info.verify_worker_id,
        draft_worker_id=info.draft_worker_id,
    )


def models_from_pb(response: pb.ListModelsResponse) -> tuple[ModelInfo, ...]:
    """From the wire."""
    return tuple(ModelInfo(m.name, m.fingerprint, m.context_len) for m in response.models)


def status_from_pb(response: pb.GetStatusResponse) -> Status:
    """From the wire."""
    return Status(
        workers=tuple(_worker_from_pb(worker) for worker in response.workers),
        running_sessions=response.running_sessions,
        finished_sessions=response.finished_sessions,
        completion_tokens=response.completion_tokens,
        speculation=wire.figures_from_pb(response.speculation),
        redis_reachable=response.redis_reachable,
    )


def _worker_from_pb(worker: pb.WorkerInfo) -> WorkerInfo:
    return WorkerInfo(
        pool="verify" if worker.pool == pb.WORKER_POOL_VERIFY else "draft",
        worker_id=worker.worker_id,
        address=worker.address,
        incarnation=worker.incarnation,
        model=worker.model,
        sessions=worker.sessions,
        capacity=worker.capacity,
        draining=worker.draining,
        connected=worker.connected,
    )
