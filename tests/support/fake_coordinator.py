"""A real gRPC server that says what a test tells it to say, in place of a coordinator."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc

from outrider import rpc
from outrider.errors import OutriderError, UnknownSessionError
from outrider.pb.v1 import coordinator_pb2 as pb
from outrider.pb.v1 import coordinator_pb2_grpc as pb_grpc
from outrider.pb.v1 import types_pb2


class Lost:
    """Ends the call as a connection that breaks does: without a word of the coordinator."""


# One step of a script: an event to send, an error to end with, an event to wait for, a break.
Step = pb.GenerateResponse | OutriderError | asyncio.Event | Lost


def started(session_id: str = "", seed: int = 7, **fields: Any) -> pb.GenerateResponse:
    body = pb.Started(session_id=session_id, model="fake", seed=seed, prompt_tokens=3, **fields)
    return pb.GenerateResponse(started=body)


def delta(
    offset: int,
    *pieces: tuple[int, str, int],
    index: int = 0,
    logprobs: Sequence[types_pb2.TokenLogprobs] = (),
) -> pb.GenerateResponse:
    made = [pb.Piece(token_id=i, text=text, origin=origin) for i, text, origin in pieces]
    for piece, entry in zip(made, logprobs, strict=False):
        piece.logprobs.CopyFrom(entry)
    return pb.GenerateResponse(delta=pb.Delta(offset=offset, pieces=made, index=index))


def logprobs(logprob: float, *top: tuple[int, float]) -> types_pb2.TokenLogprobs:
    best = [types_pb2.TokenLogprob(token_id=i, logprob=value) for i, value in top]
    return types_pb2.TokenLogprobs(logprob=logprob, top=best)


def finished(
    tokens: int, text: str = "", reason: int = 1, index: int = 0, **figures: Any
) -> pb.GenerateResponse:
    body = pb.Finished(
        index=index,
        reason=reason,
        text=text,
        usage=pb.Usage(prompt_tokens=3, completion_tokens=tokens, cached_tokens=2),
        speculation=types_pb2.SpeculationFigures(**figures),
        timings=pb.GenerateTimings(first_token_us=250_000, total_us=1_500_000),
    )
    return pb.GenerateResponse(finished=body)


PLAIN, ACCEPTED, RECOVERED, BONUS = 1, 2, 3, 4
# Two completions whose tokens come mixed; the first is over before the second.
TWO: list[Step] = [
    started(seed=7),
    delta(0, (5, "a", PLAIN)),
    delta(0, (15, "A", PLAIN), index=1),
    delta(1, (16, "B", ACCEPTED), index=1),
    delta(1, (6, "b", BONUS)),
    finished(2, "!"),
    delta(2, (17, "C", PLAIN), index=1),
    finished(3, reason=2, index=1),
]
SCRIPT: list[Step] = [
    started(),
    delta(0, (5, "Hel", PLAIN)),
    delta(1, (6, "lo", ACCEPTED), (7, " w", BONUS)),
    delta(3, (8, "", RECOVERED)),
    finished(4, "!", rounds=3, drafts=2, draft_tokens=4, accepted_tokens=1),
]


def rest(script: Sequence[Step], offsets: Sequence[int]) -> list[Step]:
    """The events of a script as `Resume` gives them: pieces from the offsets on.

    A break right after a piece that the client has is the one that it comes back from.
    """
    steps: list[Step] = []
    over = False
    for step in script:
        if isinstance(step, Lost) and over:
            continue
        if isinstance(step, pb.GenerateResponse) and step.WhichOneof("event") == "delta":
            index, offset = step.delta.index, step.delta.offset
            known = max((offsets[index] if index < len(offsets) else 0) - offset, 0)
            pieces = step.delta.pieces[known:]
            over = not pieces
            if over:
                continue
            body = pb.Delta(offset=offset + known, pieces=pieces, index=index)
            step = pb.GenerateResponse(delta=body)
        steps.append(step)
    return steps


class FakeCoordinator(pb_grpc.CoordinatorServiceServicer):
    """Plays `script` for every Generate call and keeps what it was asked.

    Resume plays the rest of `resume_script`, which is the script when it is not given.
    """

    def __init__(self, script: Sequence[Step]) -> None:
        self.script = list(script)
        self.resume_script: list[Step] | None = None
        self.resumes: list[pb.ResumeRequest] = []
        self.cancels: list[str] = []
        self.cancel_came = threading.Event()
        self.drains: list[pb.DrainWorkerRequest] = []
        # Sessions left on a drained worker, one answer after the other; the last one stays.
        self.left: list[int] = [0]
        # Played instead when speculation is off.
        self.plain_script: list[Step] | None = None
        self.requests: list[pb.GenerateRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.remaining_s: list[float] = []
        self.cancelled = threading.Event()
        self.address = ""
        self.status = pb.GetStatusResponse()
        self.cut: Callable[[], None] = lambda: None
        self.get_status: Callable[[Any, Any], Awaitable[pb.GetStatusResponse]] | None = None

    async def Generate(  # noqa: N802 - the name in the proto
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        async for response in self._play(self._script_for(request), request.session_id, context):
            yield response

    async def Resume(  # noqa: N802
        self, request: pb.ResumeRequest, context: Any
    ) -> AsyncIterator[pb.ResumeResponse]:
        self.resumes.append(request)
        script = self.script if self.resume_script is None else self.resume_script
        steps = rest(script, request.offsets)
        async for response in self._play(steps, request.session_id, context):
            yield pb.ResumeResponse(response=response)

    async def _play(
        self, steps: Sequence[Step], session_id: str, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.metadata.append(dict(context.invocation_metadata()))
        self.remaining_s.append(context.time_remaining())
        try:
            async with rpc.errors_as_status(context):
                for step in steps:
                    match step:
                        case OutriderError():
                            raise step
                        case asyncio.Event():
                            await step.wait()
                        case Lost():
                            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
                        case _:
                            if step.WhichOneof("event") == "started":
                                step.started.session_id = session_id
                            yield step
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise

    def _script_for(self, request: pb.GenerateRequest) -> list[Step]:
        off = request.speculation.mode == types_pb2.SPECULATION_MODE_OFF
        return self.plain_script if off and self.plain_script else self.script

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:  # noqa: N802
        self.metadata.append(dict(context.invocation_metadata()))
        self.cancels.append(request.session_id)
        self.cancel_came.set()
        return pb.CancelResponse(cancelled=request.session_id == "running")

    async def DrainWorker(  # noqa: N802
        self, request: pb.DrainWorkerRequest, context: Any
    ) -> pb.DrainWorkerResponse:
        self.drains.append(request)
        left = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        return pb.DrainWorkerResponse(sessions=left)

    async def GetSession(  # noqa: N802
        self, request: pb.GetSessionRequest, context: Any
    ) -> pb.GetSessionResponse:
        async with rpc.errors_as_status(context):
            if request.session_id != "known":
                raise UnknownSessionError(f"no session {request.session_id}")
        info = pb.SessionInfo(
            session_id="known",
            model="fake",
            state=pb.SESSION_STATE_FINISHED,
            finish_reason=types_pb2.FINISH_REASON_LENGTH,
            epoch=2,
            prompt_tokens=3,
            token_ids=[5, 6],
            verify_worker_id="verify-1",
            draft_worker_id="draft-1",
        )
        return pb.GetSessionResponse(session=info)

    async def ListModels(  # noqa: N802
        self, request: pb.ListModelsRequest, context: Any
    ) -> pb.ListModelsResponse:
        info = pb.ModelInfo(name="fake", fingerprint="f" * 64, context_len=64)
        return pb.ListModelsResponse(models=[info])

    async def GetStatus(  # noqa: N802
        self, request: pb.GetStatusRequest, context: Any
    ) -> pb.GetStatusResponse:
        return await self.get_status(request, context) if self.get_status else self.status


@asynccontextmanager
async def serving(
    script: Sequence[Step], port: int = 0, host: str = "127.0.0.1"
) -> AsyncIterator[FakeCoordinator]:
    """A fake coordinator on this event loop."""
    fake = FakeCoordinator(script)
    server = rpc.Server()
    pb_grpc.add_CoordinatorServiceServicer_to_server(fake, server.grpc)
    port = await server.start("outrider.v1.CoordinatorService", host, port)
    await server.set_serving(True)
    fake.address = f"{host}:{port}"
    try:
        yield fake
    finally:
        await server.stop(0)


@contextmanager
def serving_in_thread(script: Sequence[Step]) -> Iterator[FakeCoordinator]:
    """A fake coordinator on an event loop of its own, for synchronous clients.

    Its `cut` ends it at once, from any thread.
    """
    ready: list[FakeCoordinator] = []
    up = threading.Event()
    stop: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def serve() -> None:
        async with serving(script) as fake:
            end = asyncio.Event()
            stop.append((asyncio.get_running_loop(), end))
            ready.append(fake)
            up.set()
            await end.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert up.wait(20)
    loop, end = stop[0]

    def leave() -> None:
        if thread.is_alive():
            loop.call_soon_threadsafe(end.set)
            thread.join(20)

    ready[0].cut = leave
    try:
        yield ready[0]
    finally:
        leave()
