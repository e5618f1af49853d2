"""The client SDK: `Client` and `AsyncClient` speak to coordinators.

    with Client("127.0.0.1:7070") as client:
        for chunk in client.generate("Once upon a time", max_tokens=64):
            ...
        completion = client.complete(messages=[{"role": "user", "content": "Hi"}])
        three = client.complete_all("Once upon a time", n=3, temperature=0.8)

    with Client(["10.0.0.1:7070", "10.0.0.2:7070"], tenant="acme") as client:
        ...  # any of them may be killed at any time

    with Client("outrider.example:443", tls=Tls(ca="ca.crt"), token=token) as client:
        ...  # encrypted, and as whoever the token belongs to

A client takes the address of one coordinator, those of several, or a name that stands for
several. It asks the first that answers, and stays with it as long as it does. Every failure is
an `outrider.errors.OutriderError` of its kind.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Self, Unpack

from outrider._coordinators import CALL_TIMEOUT_S, AsyncCoordinators, Coordinators
from outrider._credentials import Credentials
from outrider._following import check_single
from outrider._generation import AsyncGeneration, Generation
from outrider._protocol import (
    GenerateOptions,
    models_from_pb,
    session_from_pb,
    status_from_pb,
)
from outrider._retry import Retry
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
from outrider.tls import Tls

DEFAULT_ADDRESS = "127.0.0.1:7070"
# A drain is not over before the worker has said so itself.
DRAIN_TIMEOUT_S = 30.0


class Client:
    """A synchronous client; it connects at the first call and can be shared by threads.

    addresses: host:port of a coordinator, or of several in the order in which to ask them; a
        name that has several IP addresses stands for several, in random order.
    tenant: whose sessions they are; those of another tenant are not seen.
    token: says whose they are where coordinators ask for tokens.
    tls: how coordinators are made sure of, and what they are shown; None: plaintext.
    retry: how long what fails is tried again.

    Raises:
        ConfigError: an address without a port, a tenant or token that is not plain text, or a
            file of `tls` that can't be used.
    """

    def __init__(
        self,
        addresses: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        tenant: str = "",
        token: str = "",
        tls: Tls | None = None,
        retry: Retry | None = None,
    ) -> None:
        self._coordinators = Coordinators(addresses, Credentials(tenant, token, tls))
        self._retry = retry or Retry()

    def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Generation:
        """Start a completion and return it as a stream of chunks.

        The options are those of `GenerateOptions`. The call is made at once. When its stream
        breaks, it is taken up again while it is iterated over; when the caller stops iterating
        early, the session is cancelled.

        Raises:
            InvalidRequestError: not exactly one prompt, or an argument of the wrong kind.
        """
        return Generation(self._coordinators, self._retry, prompt, options)

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
        metadata = self._coordinators.metadata
        return self._coordinators.ask(
            lambda stub: stub.Cancel(request, timeout=CALL_TIMEOUT_S, metadata=metadata)
        ).cancelled

    def get_session(self, session_id: str) -> SessionInfo:
        """What the records say about a session; `UnknownSessionError` when there is none."""
        request = pb.GetSessionRequest(session_id=session_id)
        metadata = self._coordinators.metadata
        response = self._coordinators.ask(
            lambda stub: stub.GetSession(request, timeout=CALL_TIMEOUT_S, metadata=metadata)
        )
        return session_from_pb(response.session)

    def list_models(self) -> tuple[ModelInfo, ...]:
        """The models that are served."""
        request = pb.ListModelsRequest()
        metadata = self._coordinators.metadata
        return models_from_pb(
            self._coordinators.ask(
                lambda stub: stub.ListModels(request, timeout=CALL_TIMEOUT_S, metadata=metadata)
            )
        )

    def status(self) -> Status:
        """Workers, sessions and figures, as one coordinator sees them."""
        request = pb.GetStatusRequest()
        metadata = self._coordinators.metadata
        return status_from_pb(
            self._coordinators.ask(
                lambda stub: stub.GetStatus(request, timeout=CALL_TIMEOUT_S, metadata=metadata)
            )
        )

    def drain(self, worker_id: str, *, draining: bool = True) -> int:
        """Have a worker take no more sessions and give up those it has, or serve again.

        Returns the sessions that are still on it once it has obeyed.

        Raises:
            NotFoundError: no such worker is up.
            UnavailableError: it did not obey in time.
        """
        request = pb.DrainWorkerRequest(worker_id=worker_id, draining=draining)
        metadata = self._coordinators.metadata
        return self._coordinators.ask(
            lambda stub: stub.DrainWorker(request, timeout=DRAIN_TIMEOUT_S, metadata=metadata)
        ).sessions

    def close(self) -> None:
        """Cancel what still runs and close the connections."""
        self._coordinators.close()

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
    """An asynchronous client; it connects at the first call and belongs to one event loop.

    The arguments are those of `Client`.
    """

    def __init__(
        self,
        addresses: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        tenant: str = "",
        token: str = "",
        tls: Tls | None = None,
        retry: Retry | None = None,
    ) -> None:
        self._coordinators = AsyncCoordinators(addresses, Credentials(tenant, token, tls))
        self._retry = retry or Retry()

    def generate(
        self, prompt: str | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGeneration:
        """Start a completion and return it as a stream of chunks; see `Client.generate`.

        While the name of a coordinator has not been looked up, the call is made at the first
        step of the iteration.
        """
        return AsyncGeneration(self._coordinators, self._retry, prompt, options)

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
        metadata = self._coordinators.metadata
        response = await self._coordinators.ask(
            lambda stub: stub.Cancel(request, timeout=CALL_TIMEOUT_S, metadata=metadata)
        )
        return response.cancelled

    async def get_session(self, session_id: str) -> SessionInfo:
        """What the records say about a session; `UnknownSessionError` when there is none."""
        request = pb.GetSessionRequest(session_id=session_id)
        metadata = self._coordinators.metadata
        response = await self._coordinators.ask(
            lambda stub: stub.GetSession(request, timeout=CALL_TIMEOUT_S, metadata=metadata)
        )
        return session_from_pb(response.session)

    async def list_models(self) -> tuple[ModelInfo, ...]:
        """The models that are served."""
        request = pb.ListModelsRequest()
        metadata = self._coordinators.metadata
        return models_from_pb(
            await self._coordinators.ask(
                lambda stub: stub.ListModels(request, timeout=CALL_TIMEOUT_S, metadata=metadata)
            )
        )

    async def status(self) -> Status:
        """Workers, sessions and figures, as one coordinator sees them."""
        request = pb.GetStatusRequest()
        metadata = self._coordinators.metadata
        return status_from_pb(
            await self._coordinators.ask(
                lambda stub: stub.GetStatus(request, timeout=CALL_TIMEOUT_S, metadata=metadata)
            )
        )

    async def drain(self, worker_id: str, *, draining: bool = True) -> int:
        """Have a worker give up its sessions, or serve again; see `Client.drain`."""
        request = pb.DrainWorkerRequest(worker_id=worker_id, draining=draining)
        metadata = self._coordinators.metadata
        response = await self._coordinators.ask(
            lambda stub: stub.DrainWorker(request, timeout=DRAIN_TIMEOUT_S, metadata=metadata)
        )
        return response.sessions

    async def close(self) -> None:
        """Cancel what still runs and close the connections."""
        await self._coordinators.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


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
    "Retry",
    "SessionInfo",
    "Status",
    "Tls",
    "TokenLogprobs",
    "Usage",
    "WorkerInfo",
]
