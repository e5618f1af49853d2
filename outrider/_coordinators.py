"""Connections to the coordinators of a client, synchronous and asynchronous.

Each endpoint has a channel, opened when it is first asked. The short calls go to the first
coordinator that answers. A session is cancelled in the background: whoever leaves a loop does
not wait for that, but `close` does for a moment.
"""

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar
from weakref import WeakSet

import grpc
from grpc_status import rpc_status

from outrider import rpc
from outrider._credentials import Channels, Credentials, Options
from outrider._directory import Directory
from outrider.errors import DeadlineError, OutriderError, UnavailableError
from outrider.pb.v1 import coordinator_pb2 as pb
from outrider.pb.v1 import coordinator_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from outrider.pb.v1.coordinator_pb2_grpc import CoordinatorServiceAsyncStub

# Of the short calls; how long a completion takes is for the caller to say.
CALL_TIMEOUT_S = 10.0
CANCEL_TIMEOUT_S = 2.0
# How long a coordinator may take to answer a connection; a stopped process never does.
CONNECT_TIMEOUT_MS = 5_000

T = TypeVar("T")
_OPTIONS = [*rpc.CHANNEL_OPTIONS, ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS)]
# What grpc may say of a stream that was cut, besides UNAVAILABLE.
_CUT = (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN)


def call_error(
    error: grpc.RpcError, endpoint: str, coordinators: object, *, answered: bool = False
) -> OutriderError:
    """The error of a failed call; says what to start when nothing answers.

    `coordinators` names all of them; `answered`: the call had brought something before.
    """
    found = rpc.error_of(error, endpoint)
    if rpc_status.from_call(error) is not None:  # type: ignore[arg-type]  # see rpc.py
        return found
    code, details = error.code(), error.details() or ""
    cut = code in _CUT or (code is grpc.StatusCode.INTERNAL and "RST_STREAM" in details)
    if answered and (cut or isinstance(found, UnavailableError)):
        return UnavailableError(f"lost the connection to the coordinator at {endpoint}: {details}")
    if cut or isinstance(found, UnavailableError):
        return UnavailableError(
            f"nothing answers at {coordinators} ({details}): is a coordinator running there, with "
            "the TLS that is expected? `outrider up` starts everything on this machine"
        )
    return found


def _open_channel(
    endpoint: str, credentials: grpc.ChannelCredentials | None, options: Options
) -> grpc.Channel:
    options = [*_OPTIONS, *options]
    if credentials is None:
        return grpc.insecure_channel(endpoint, options=options)
    return grpc.secure_channel(endpoint, credentials, options=options)


def _open_aio_channel(
    endpoint: str, credentials: grpc.ChannelCredentials | None, options: Options
) -> grpc.aio.Channel:
    options = [*_OPTIONS, *options]
    if credentials is None:
        return grpc.aio.insecure_channel(endpoint, options=options)
    return grpc.aio.secure_channel(endpoint, credentials, options=options)


class Followed(Protocol):
    """What `close` has to end; both kinds of generation."""

    def cancel(self) -> None:
        """Cancel the session if it still runs."""
        ...


class Coordinators:
    """The synchronous connections; threads may share them."""

    def __init__(self, addresses: str | Sequence[str], credentials: Credentials) -> None:
        self.directory = Directory(addresses)
        self.metadata = credentials.metadata
        credentials.warn_if_exposed(self.directory.addresses)
        # Threads that make their first calls at once share one channel. Reentrant, for a
        # generation that is collected here and now cancels its session.
        self._lock = threading.RLock()
        self._channels: Channels[grpc.Channel] = Channels(credentials.tls, _open_channel)
        self._stubs: dict[str, pb_grpc.CoordinatorServiceStub] = {}
        self._cancelling: set[threading.Thread] = set()
        self._followed: WeakSet[Followed] = WeakSet()

    def look_up(self) -> None:
        """Look up the names whose addresses are not known; takes as long as the resolver."""
        for address, host, port in self.directory.to_resolve():
            try:
                found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                self.directory.learn(address, [str(info[4][0]) for info in found])
            except OSError as error:
                self.directory.learn(address, [], str(error))

    def stub(self, endpoint: str) -> pb_grpc.CoordinatorServiceStub:
        """What makes calls to an endpoint."""
        with self._lock:
            channel, new = self._channels.get(endpoint, self.directory.host_of(endpoint))
            if new:
                self._stubs[endpoint] = pb_grpc.CoordinatorServiceStub(channel)
            return self._stubs[endpoint]

    def follow(self, generation: Followed) -> None:
        """Cancel it on `close`, unless it has ended by then or nobody has it any more."""
        with self._lock:
            self._followed.add(generation)

    def ask(self, call: Callable[[pb_grpc.CoordinatorServiceStub], T]) -> T:
        """The answer to a short call that may be made twice, of the first that gives one.

        Raises:
            OutriderError: what a coordinator said against it, or no coordinator answers.
        """
        self.look_up()
        failure: OutriderError | None = None
        for endpoint in self.directory.endpoints() or [self.directory.first()]:
            try:
                answer = call(self.stub(endpoint))
            except grpc.RpcError as error:
                failure = call_error(error, endpoint, self.directory)
                if not isinstance(failure, UnavailableError | DeadlineError):
                    raise failure from error
                self.directory.failed(endpoint)
            else:
                self.directory.worked(endpoint)
                return answer
        assert failure is not None  # there is an endpoint
        raise failure

    def cancel_soon(self, session_id: str) -> None:
        """Cancel a session without waiting for it, at whichever coordinator answers."""
        thread = threading.Thread(target=self._cancel, args=(session_id,), daemon=True)
        with self._lock:
            self._cancelling = {t for t in self._cancelling if t.is_alive()} | {thread}
            # Within the lock, for `close` joins only what has started.
            thread.start()

    def _cancel(self, session_id: str) -> None:
        request = pb.CancelRequest(session_id=session_id)
        try:
            self.ask(
                lambda stub: stub.Cancel(request, timeout=CANCEL_TIMEOUT_S, metadata=self.metadata)
            )
        except (OutriderError, ValueError):
            # A session that nobody follows is given up by itself; ValueError: closed meanwhile.
            return

    def close(self) -> None:
        """Cancel what still runs and close the connections."""
        with self._lock:
            followed = list(self._followed)
        for generation in followed:
            generation.cancel()
        with self._lock:
            cancelling = list(self._cancelling)
        deadline = time.monotonic() + CANCEL_TIMEOUT_S
        for thread in cancelling:
            thread.join(max(deadline - time.monotonic(), 0.0))
        with self._lock:
            for channel in self._channels.all:
                channel.close()


class AsyncCoordinators:
    """The asynchronous connections, of one event loop."""

    def __init__(self, addresses: str | Sequence[str], credentials: Credentials) -> None:
        self.directory = Directory(addresses)
        self.metadata = credentials.metadata
        credentials.warn_if_exposed(self.directory.addresses)
        self._channels: Channels[grpc.aio.Channel] = Channels(credentials.tls, _open_aio_channel)
        self._stubs: dict[str, CoordinatorServiceAsyncStub] = {}
        self._cancelling: set[asyncio.Task[None]] = set()
        self._followed: WeakSet[Followed] = WeakSet()

    async def look_up(self) -> None:
        """Look up the names whose addresses are not known."""
        for address, host, port in self.directory.to_resolve():
            try:
                loop = asyncio.get_running_loop()
                found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                self.directory.learn(address, [str(info[4][0]) for info in found])
            except OSError as error:
                self.directory.learn(address, [], str(error))

    def stub(self, endpoint: str) -> "CoordinatorServiceAsyncStub":
        """What makes calls to an endpoint."""
        channel, new = self._channels.get(endpoint, self.directory.host_of(endpoint))
        if new:
            self._stubs[endpoint] = pb_grpc.CoordinatorServiceStub(channel)
        return self._stubs[endpoint]

    def follow(self, generation: Followed) -> None:
        """Cancel it on `close`, unless it has ended by then or nobody has it any more."""
        self._followed.add(generation)

    async def ask(self, call: "Callable[[CoordinatorServiceAsyncStub], Awaitable[T]]") -> T:
        """The answer to a short call that may be made twice, of the first that gives one.

        Raises:
            OutriderError: what a coordinator said against it, or no coordinator answers.
        """
        await self.look_up()
        failure: OutriderError | None = None
        for endpoint in self.directory.endpoints() or [self.directory.first()]:
            try:
                answer = await call(self.stub(endpoint))
            except grpc.RpcError as error:
                failure = call_error(error, endpoint, self.directory)
                if not isinstance(failure, UnavailableError | DeadlineError):
                    raise failure from error
                self.directory.failed(endpoint)
            else:
                self.directory.worked(endpoint)
                return answer
        assert failure is not None  # there is an endpoint
        raise failure

    def cancel_soon(self, session_id: str) -> None:
        """Cancel a session without waiting for it, at whichever coordinator answers."""
        task = asyncio.get_running_loop().create_task(self._cancel(session_id))
        self._cancelling.add(task)
        task.add_done_callback(self._cancelling.discard)

    async def _cancel(self, session_id: str) -> None:
        request = pb.CancelRequest(session_id=session_id)
        try:
            await self.ask(
                lambda stub: stub.Cancel(request, timeout=CANCEL_TIMEOUT_S, metadata=self.metadata)
            )
        except OutriderError:
            return  # a session that nobody follows is given up by itself

    async def close(self) -> None:
        """Cancel what still runs and close the connections."""
        for generation in list(self._followed):
            generation.cancel()
        if self._cancelling:
            _, late = await asyncio.wait(self._cancelling, timeout=CANCEL_TIMEOUT_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        for channel in self._channels.all:
            await channel.close(None)
