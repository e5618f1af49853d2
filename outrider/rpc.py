"""What every gRPC server and channel of Outrider has in common.

Servers: message limits, keepalive, the standard health service, reflection, and errors as
`google.rpc.Status`. Channels: the same limits and keepalive.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]  # not in stubs
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from outrider.callers import Check, Gate
from outrider.errors import (
    AddressInUseError,
    ConfigError,
    InternalError,
    InvalidRequestError,
    OutriderError,
    UnavailableError,
    from_reason,
    from_status,
    to_status,
)
from outrider.tls import TlsFiles

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# What to ask health checks for to learn whether the process should be started again. The service
# itself, or "", says whether new work is welcome, which is another matter: not while it drains.
LIVENESS = "liveness"
# In what grpc says of a message above it.
TOO_LARGE = "message larger than max"
# What grpc says when it writes to a call that has ended and has not yet read why.
CUT_OFF = "Internal error from Core"
KEEPALIVE_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000

_LIMITS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
]
CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    *_LIMITS,
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]
# A client may ping as often as ours does, also while nothing is said (a long prefill).
SERVER_OPTIONS: list[tuple[str, Any]] = [
    *_LIMITS,
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
]


class Server:
    """A grpc.aio server with health and reflection.

    It is not alive until `set_alive(True)`, and not serving until `set_serving(True)`. It takes
    messages of up to `receive_bytes`. With `tls` it speaks nothing else, and wants a
    certificate of whoever connects unless `require_client` is false. Calls pass all `checks`.
    """

    def __init__(
        self,
        receive_bytes: int = MAX_MESSAGE_BYTES,
        *,
        tls: TlsFiles | None = None,
        require_client: bool = True,
        checks: Sequence[Check] = (),
    ) -> None:
        options = {**dict(SERVER_OPTIONS), "grpc.max_receive_message_length": receive_bytes}
        gates = [Gate(checks, abort)] if checks else []
        self.grpc = grpc.aio.server(options=list(options.items()), interceptors=gates)
        self._credentials = (
            None if tls is None else tls.server_credentials(require_client=require_client)
        )
        self._health = health_aio.HealthServicer()
        self._names: list[str] = []
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)

    async def start(self, service_name: str, host: str, port: int) -> int:
        """Listen on host:port (0: any free port) and return the port.

        Raises:
            AddressInUseError: somebody listens there already.
        """
        health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        self._names = [service_name]
        reflection.enable_server_reflection(
            [service_name, health_name, reflection.SERVICE_NAME], self.grpc
        )
        await self.set_serving(False)
        await self.set_alive(False)
        try:
            if self._credentials is None:
                bound = self.grpc.add_insecure_port(f"{host}:{port}")
            else:
                bound = self.grpc.add_secure_port(f"{host}:{port}", self._credentials)
        except RuntimeError as error:
            raise AddressInUseError(
                f"can't listen on {host}:{port}; is another service using the port? "
                "Choose another one with --port"
            ) from error
        await self.grpc.start()
        return int(bound)

    async def set_serving(self, serving: bool) -> None:
        """Say to health checks whether new work is welcome."""
        for name in ["", *self._names]:
            await self._health.set(name, _status(serving))

    async def set_alive(self, alive: bool) -> None:
        """Say to health checks whether what this process does goes on."""
        await self._health.set(LIVENESS, _status(alive))

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones `grace_s` seconds, then cancel them."""
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(grace_s)


def _status(good: bool) -> int:
    status = health_pb2.HealthCheckResponse.ServingStatus
    return int(status.SERVING if good else status.NOT_SERVING)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: OutriderError) -> NoReturn:
    """End the call with the error's status and details."""
    status = rpc_status.to_status(to_status(error))
    await context.abort(status.code, status.details, tuple(status.trailing_metadata or ()))
    raise AssertionError("abort returns never")


@asynccontextmanager
async def errors_as_status(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Turn an `OutriderError` raised in the body into the status of the call."""
    try:
        yield
    except OutriderError as error:
        await abort(context, error)


def error_of(call_error: grpc.RpcError, target: str) -> OutriderError:
    """The Outrider error that a failed call carries; `target` is named when nothing answered."""
    status = rpc_status.from_call(call_error)  # type: ignore[arg-type]  # aio errors work too
    if status is not None:
        return from_status(status)
    code, details = call_error.code(), call_error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE:
        return UnavailableError(f"nothing answers at {target}: {details}")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and TOO_LARGE in details:
        # Of grpc itself, on either side; unlike a full service it will say so every time.
        return InvalidRequestError(f"a message to or from {target} is above the limit: {details}")
    if code is grpc.StatusCode.INTERNAL and details == CUT_OFF:
        return UnavailableError(f"{target} ended the call while it was written to")
    return from_reason("", f"call to {target} failed: {code.name}: {details}", code)


@contextmanager
def status_as_errors(target: str) -> Iterator[None]:
    """Turn a failed call in the body into the Outrider error that it carries."""
    try:
        yield
    except grpc.RpcError as error:
        raise error_of(error, target) from error


def check_address(address: str) -> None:
    """Refuse an address without a port with a `ConfigError`."""
    if not address.rpartition(":")[2].isdecimal() or not address.rpartition(":")[0]:
        raise ConfigError(f"address {address!r} has no port; write HOST:PORT")


def open_channel(address: str, tls: TlsFiles | None = None) -> grpc.aio.Channel:
    """An asynchronous channel to host:port, with the credentials that `tls` has now."""
    check_address(address)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    _, credentials = tls.channel_credentials()
    return grpc.aio.secure_channel(
        address, credentials, options=[*CHANNEL_OPTIONS, *tls.options_for()]
    )


__all__ = [
    "CHANNEL_OPTIONS",
    "LIVENESS",
    "SERVER_OPTIONS",
    "InternalError",
    "Server",
    "abort",
    "check_address",
    "error_of",
    "errors_as_status",
    "open_channel",
    "status_as_errors",
]
