"""A real gRPC server that says what a test tells it to say, in place of a coordinator."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from outrider import rpc
from outrider.errors import OutriderError, UnknownSessionError
from outrider.pb.v1 import coordinator_pb2 as pb
from outrider.pb.v1 import coordinator_pb2_grpc as pb_grpc
from outrider.pb.v1 import types_pb2

# One step of a script: an event to send, an error to end with, or an event to wait for.
Step = pb.GenerateResponse | OutriderError | asyncio.Event


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


class FakeCoordinator(pb_grpc.CoordinatorServiceServicer):
    """Plays `script` for every Generate call and keeps what it was asked."""

    def __init__(self, script: Sequence[Step]) -> None:
        self.script = list(script)
        # Played instead when speculation is off.
        self.plain_script: list[Step] | None = None
        self.requests: list[pb.GenerateRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.remaining_s: list[float] = []
        self.cancelled = threading.Event()
        self.address = ""
        self.status = pb.GetStatusResponse()
        self.get_status: Callable[[Any, Any], Awaitable[pb.GetStatusResponse]] | None = None

    async def Generate(  # noqa: N802 - the name in the proto
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.remaining_s.append(context.time_remaining())
        try:
            async with rpc.errors_as_status(context):
                for step in self._script_for(request):
                    if isinstance(step, OutriderError):
                        raise step
                    if isinstance(step, asyncio.Event):
                        await step.wait()
                        continue
                    if step.WhichOneof("event") == "started":
                        step.started.session_id = request.session_id
                    yield step
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise

    def _script_for(self, request: pb.GenerateRequest) -> list[Step]:
        off = request.speculation.mode == types_pb2.SPECULATION_MODE_OFF
        return self.plain_script if off and self.plain_script else self.script

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:  # noqa: N802
        return pb.CancelResponse(cancelled=request.session_id == "running")

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
async def serving(script: Sequence[Step], port: int = 0) -> AsyncIterator[FakeCoordinator]:
    """A fake coordinator on this event loop."""
    fake = FakeCoordinator(script)
    server = rpc.Server()
    pb_grpc.add_CoordinatorServiceServicer_to_server(fake, server.grpc)
    port = await server.start("outrider.v1.CoordinatorService", "127.0.0.1", port)
    await server.set_serving(True)
    fake.address = f"127.0.0.1:{port}"
    try:
        yield fake
    finally:
        await server.stop(0)


@contextmanager
def serving_in_thread(script: Sequence[Step]) -> Iterator[FakeCoordinator]:
    """A fake coordinator on an event loop of its own, for synchronous clients."""
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
    try:
        yield ready[0]
    finally:
        loop, end = stop[0]
        loop.call_soon_threadsafe(end.set)
        thread.join(20)
