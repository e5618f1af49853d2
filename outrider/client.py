"""The client SDK: `Client` and `AsyncClient` speak to a coordinator.

    with Client("127.0.0.1:7070") as client:
        for chunk in client.generate("Once upon a time", max_tokens=64):
            ...
        completion = client.complete(messages=[{"role": "user", "content": "Hi"}])
        three = client.complete_all("Once upon a time", n=3, temperature=0.8)

Every failure is an `outrider.errors.OutriderError` of its kind.
"""

import threading
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, Unpack

import grpc

from outrider import rpc
from outrider._generation import AsyncGeneration, Generation, call_error, check_single
from outrider._protocol import (
    GenerateOptions,
    models_from_pb,
    session_from_pb,
    status_from_pb,
)
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
from outrider.messages import TokenLogprobs
from outrider.pb.v1 import coordinator_pb2 as pb
from outrider.pb.v1 import coordinator_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from outrider.pb.v1.coordinator_pb2_grpc import CoordinatorServiceAsyncStub

DEFAULT_ADDRESS = "127.0.0.1:7070"
# Of the short calls; how long a completion takes is for the caller to say.
CALL_TIMEOUT_S = 10.0

T = TypeVar("T")


class Client:
    """A synchronous client; it connects at the first call and can be shared by threads."""

    def __init__(self, address: str = DEFAULT_ADDRESS) -> None:
        self.address = address
        # Threads that make their first calls at once share one channel.
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._made: pb_grpc.CoordinatorServiceStub | None = None

    @property
    def _stub(self) -> pb_grpc.CoordinatorServiceStub:
        with self._lock:
            if self._made is None:
                rpc.check_address(self.address)
                self._channel = grpc.insecure_channel(self.address, options=rpc.CHANNEL_OPTIONS)
                self._made = pb_grpc.CoordinatorServiceStub(self._channel)
            return self._made

    def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Generation:
        """Start a completion and return it as a stream of chunks.

        The options are those of `GenerateOptions`. The call is made at once; it is cancelled
        when the caller stops iterating early.

        Raises:
            InvalidRequestError: not exactly one prompt, or an argument of the wrong kind.
        """
        return Generation(self._stub.Generate, self.address, prompt, options)

    def complete(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Completion:
        """The whole completion at once; the options and errors of `generate` and of its stream.

        Raises:
            InvalidRequestError: `n` is above 1; see `complete_all`.
        """
        check_single(options.get("n", 1))
        return self.generate(prompt, **options).complete()

    def complete_all(
        self, prompt: str | None = None, **options: Unpack[GenerateOptions]
    ) -> list[Completion]:
        """All `n` whole completions at once, in the order of their index."""
        return self.generate(prompt, **options).complete_all()

    def cancel(self, session_id: str) -> bool:
        """Cancel any session by its id; False when it had ended already."""
        request = pb.CancelRequest(session_id=session_id)
        with _errors(self.address):
            return self._stub.Cancel(request, timeout=CALL_TIMEOUT_S).cancelled

    def get_session(self, session_id: str) -> SessionInfo:
        """What the records say about a session; `UnknownSessionError` when there is none."""
        request = pb.GetSessionRequest(session_id=session_id)
        with _errors(self.address):
            response = self._stub.GetSession(request, timeout=CALL_TIMEOUT_S)
        return session_from_pb(response.session)

    def list_models(self) -> tuple[ModelInfo, ...]:
        """The models that are served."""
        with _errors(self.address):
            response = self._stub.ListModels(pb.ListModelsRequest(), timeout=CALL_TIMEOUT_S)
        return models_from_pb(response)

    def status(self) -> Status:
        """Workers, sessions and figures."""
        with _errors(self.address):
            response = self._stub.GetStatus(pb.GetStatusRequest(), timeout=CALL_TIMEOUT_S)
        return status_from_pb(response)

    def close(self) -> None:
        """Close the connection; calls that still run are cancelled."""
        with self._lock:
            if self._channel is not None:
                self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncClient:
    """An asynchronous client; it connects at the first call and belongs to one event loop."""

    def __init__(self, address: str = DEFAULT_ADDRESS) -> None:
        self.address = address

    @cached_property
    def _channel(self) -> grpc.aio.Channel:
        return rpc.open_channel(self.address)

    @cached_property
    def _stub(self) -> "CoordinatorServiceAsyncStub":
        return pb_grpc.CoordinatorServiceStub(self._channel)

    def generate(
        self, prompt: str | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGeneration:
        """Start a completion and return it as a stream of chunks; see `Client.generate`."""
        return AsyncGeneration(self._stub.Generate, self.address, prompt, options)

    async def complete(
        self, prompt: str | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """The whole completion at once; see `Client.complete`."""
        check_single(options.get("n", 1))
        return await self.generate(prompt, **options).complete()

    async def complete_all(
        self, prompt: str | None = None, **options: Unpack[GenerateOptions]
    ) -> list[Completion]:
        """All `n` whole completions at once, in the order of their index."""
        return await self.generate(prompt, **options).complete_all()

    async def cancel(self, session_id: str) -> bool:
        """Cancel any session by its id; False when it had ended already."""
        request = pb.CancelRequest(session_id=session_id)
        return (await self._answer(self._stub.Cancel(request, timeout=CALL_TIMEOUT_S))).cancelled

    async def get_session(self, session_id: str) -> SessionInfo:
        """What the records say about a session; `UnknownSessionError` when there is none."""
        request = pb.GetSessionRequest(session_id=session_id)
        response = await self._answer(self._stub.GetSession(request, timeout=CALL_TIMEOUT_S))
        return session_from_pb(response.session)

    async def list_models(self) -> tuple[ModelInfo, ...]:
        """The models that are served."""
        call = self._stub.ListModels(pb.ListModelsRequest(), timeout=CALL_TIMEOUT_S)
        return models_from_pb(await self._answer(call))

    async def status(self) -> Status:
        """Workers, sessions and figures."""
        call = self._stub.GetStatus(pb.GetStatusRequest(), timeout=CALL_TIMEOUT_S)
        return status_from_pb(await self._answer(call))

    async def _answer(self, call: Awaitable[T]) -> T:
        with _errors(self.address):
            return await call

    async def close(self) -> None:
        """Close the connection; calls that still run are cancelled."""
        if "_channel" in self.__dict__:
            await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


@contextmanager
def _errors(address: str) -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise call_error(error, address) from error


__all__ = [
    "DEFAULT_ADDRESS",
    "AsyncClient",
    "AsyncGeneration",
    "Chunk",
    "Client",
    "Completion",
    "GenerateOptions",
    "GenerateTimings",
    "Generation",
    "ModelInfo",
    "Piece",
    "SessionInfo",
    "Status",
    "TokenLogprobs",
    "Usage",
    "WorkerInfo",
]
