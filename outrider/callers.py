"""Who may call a server: each call is checked before its handler sees it.

A check is told the method and the context of a call and raises an `OutriderError` to refuse it.
Health checks are not asked anything beyond TLS itself, so that whatever watches the process can.
"""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc

from outrider.errors import OutriderError, PermissionDeniedError, UnauthenticatedError

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Check: TypeAlias = Callable[[str, Context], None]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
if TYPE_CHECKING:  # generic for the type checker only
    _Interceptor: TypeAlias = grpc.aio.ServerInterceptor[Any, Any]
else:
    _Interceptor = grpc.aio.ServerInterceptor
# The name that the certificate of each part has, which tells its role.
COORDINATOR_NAME = "coordinator.outrider"
VERIFY_WORKER_NAME = "verify-worker.outrider"
DRAFT_WORKER_NAME = "draft-worker.outrider"
CLIENT_NAME = "client.outrider"
HEALTH = "/grpc.health.v1.Health/"
_DNS_AND_URI = ("peer_dns", "peer_uri")
_MAKERS: dict[tuple[bool, bool], Callable[..., Any]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class Gate(_Interceptor):
    """Has every call but health checks pass all checks; a refused one ends with their error."""

    def __init__(
        self, checks: Sequence[Check], refuse: Callable[[Context, OutriderError], Awaitable[None]]
    ) -> None:
        self._checks = checks
        self._refuse = refuse

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Put the checks before the handler of a call."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(HEALTH):
            return handler
        return self._checked(method, handler)

    def _checked(self, method: str, handler: Any) -> Handler:
        kind = handler.request_streaming, handler.response_streaming
        answer = (
            handler.unary_unary
            or handler.unary_stream
            or handler.stream_unary
            or handler.stream_stream
        )

        async def check(context: Context) -> None:
            try:
                for ask in self._checks:
                    ask(method, context)
            except OutriderError as error:
                await self._refuse(context, error)

        async def stream(request: Any, context: Context) -> Any:
            await check(context)
            async for response in answer(request, context):
                yield response

        async def call(request: Any, context: Context) -> Any:
            await check(context)
            return await answer(request, context)

        made: Handler = _MAKERS[kind](
            stream if inspect.isasyncgenfunction(answer) else call,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
        return made


def only_named(patterns: Sequence[str]) -> Check:
    """Refuses who has no certificate with a DNS or URI name that fits one of the patterns.

    A `*` in a pattern stands for anything.
    """

    def check(method: str, context: Context) -> None:
        names = names_of(context)
        if not names:
            raise UnauthenticatedError(f"{method} needs a certificate with a name in it")
        if not any(fnmatchcase(name, pattern) for name in names for pattern in patterns):
            raise PermissionDeniedError(
                f"{', '.join(names)} may not call {method}; who may: {', '.join(patterns)}"
            )

    return check


def names_of(context: Context) -> list[str]:
    """The DNS and URI names of the caller's certificate, which TLS has checked."""
    found = context.auth_context() or {}
    return [
        name.decode("utf-8", "replace") for kind in _DNS_AND_URI for name in found.get(kind, ())
    ]
