"""Servers and channels: errors, health, limits, ports."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from outrider import rpc
from outrider.errors import (
    AddressInUseError,
    ConfigError,
    InternalError,
    InvalidRequestError,
    OutriderError,
    OverloadedError,
    UnavailableError,
    UnknownSessionError,
    error_types,
)
from outrider.pb.v1 import coordinator_pb2 as pb
from outrider.pb.v1 import coordinator_pb2_grpc as pb_grpc

NAME = "outrider.v1.CoordinatorService"


class Servicer(pb_grpc.CoordinatorServiceServicer):
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:  # noqa: N802
        async with rpc.errors_as_status(context):
            if self.error:
                raise self.error
        return pb.CancelResponse(cancelled=True)

    async def Generate(  # noqa: N802 - the name in the proto
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        async with rpc.errors_as_status(context):
            yield pb.GenerateResponse(delta=pb.Delta(pieces=[pb.Piece(text=request.text)]))
            if self.error:
                raise self.error


@asynccontextmanager
async def serving(
    error: Exception | None = None,
) -> AsyncIterator[tuple[rpc.Server, grpc.aio.Channel, int]]:
    server = rpc.Server()
    pb_grpc.add_CoordinatorServiceServicer_to_server(Servicer(error), server.grpc)
    port = await server.start(NAME, "127.0.0.1", 0)
    try:
        async with rpc.open_channel(f"127.0.0.1:{port}") as channel:
            yield server, channel, port
    finally:
        await server.stop(0)


@pytest.mark.parametrize(
    "kind", [kind for kind in error_types().values() if kind.__module__ == "outrider.errors"]
)
async def test_every_error_crosses_a_real_call(kind: type[OutriderError]) -> None:
    async with serving(kind("what happened: ü")) as (_, channel, _):
        stub = pb_grpc.CoordinatorServiceStub(channel)
        with pytest.raises(kind, match="what happened: ü") as caught, rpc.status_as_errors("x"):
            await stub.Cancel(pb.CancelRequest())
        assert type(caught.value) is kind


async def test_error_in_mid_stream_comes_after_what_was_sent() -> None:
    async with serving(OverloadedError("full")) as (_, channel, _):
        seen: list[str] = []

        async def read() -> None:
            request = pb.GenerateRequest(text="a")
            async for event in pb_grpc.CoordinatorServiceStub(channel).Generate(request):
                seen.append(event.delta.pieces[0].text)

        with pytest.raises(OverloadedError, match="full"), rpc.status_as_errors("x"):
            await read()
        assert seen == ["a"]


async def test_a_status_without_details_keeps_its_code() -> None:
    async with serving() as (_, channel, _):
        with pytest.raises(InternalError, match="UNIMPLEMENTED"), rpc.status_as_errors("x"):
            await pb_grpc.CoordinatorServiceStub(channel).ListModels(pb.ListModelsRequest())


async def test_nobody_there_names_the_target() -> None:
    async with rpc.open_channel("127.0.0.1:1") as channel:
        with (
            pytest.raises(UnavailableError, match="the-target"),
            rpc.status_as_errors("the-target"),
        ):
            await pb_grpc.CoordinatorServiceStub(channel).Cancel(pb.CancelRequest())


def test_a_call_that_ended_while_it_was_written_to_may_be_made_again() -> None:
    # As grpc.aio reports it when it has not read yet what the call ended with.
    nothing = grpc.aio.Metadata()
    cut_off = grpc.aio.AioRpcError(
        grpc.StatusCode.INTERNAL, nothing, nothing, "Internal error from Core"
    )
    error = rpc.error_of(cut_off, "the-target")
    assert isinstance(error, UnavailableError)
    assert "the-target ended the call" in str(error)


async def test_other_exceptions_pass_through() -> None:
    with pytest.raises(asyncio.CancelledError), rpc.status_as_errors("x"):
        raise asyncio.CancelledError
    with pytest.raises(UnknownSessionError), rpc.status_as_errors("x"):
        raise UnknownSessionError("s")


async def test_health_follows_set_serving_and_ends_at_stop() -> None:
    status = health_pb2.HealthCheckResponse.ServingStatus
    async with serving() as (server, channel, _):
        stub = health_pb2_grpc.HealthStub(channel)

        async def ask(service: str) -> int:
            return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status

        assert await ask("") == await ask(NAME) == status.NOT_SERVING
        await server.set_serving(True)
        assert await ask("") == await ask(NAME) == status.SERVING
        await server.set_serving(False)
        assert await ask("") == await ask(NAME) == status.NOT_SERVING


async def test_reflection_lists_the_service() -> None:
    async with serving() as (_, channel, _):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = stub.ServerReflectionInfo(iter([request]))
        answer = await call.read()
        names = {service.name for service in answer.list_services_response.service}
        assert {NAME, "grpc.health.v1.Health"} <= names


async def test_case_33_messages_above_4_mib_pass_both_ways() -> None:
    text = "x" * (6 * 1024 * 1024)
    async with serving() as (_, channel, _):
        call = pb_grpc.CoordinatorServiceStub(channel).Generate(pb.GenerateRequest(text=text))
        answer = await call.read()
        assert answer.delta.pieces[0].text == text


async def test_messages_above_the_limit_are_invalid_and_not_worth_a_retry() -> None:
    text = "x" * rpc.MAX_MESSAGE_BYTES
    request = pb.GenerateRequest(text=text)
    async with serving() as (_, channel, port):
        said = pytest.raises(InvalidRequestError, match=r"the-target is above the limit.*67108864")
        with said, rpc.status_as_errors("the-target"):
            await pb_grpc.CoordinatorServiceStub(channel).Generate(request).read()
        # The server refuses it too, when the client has no limit of its own.
        unlimited = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=unlimited) as other:
            with pytest.raises(InvalidRequestError, match="67108864"), rpc.status_as_errors("x"):
                await pb_grpc.CoordinatorServiceStub(other).Generate(request).read()


async def test_a_server_may_take_less_than_others() -> None:
    server = rpc.Server(receive_bytes=1000)
    pb_grpc.add_CoordinatorServiceServicer_to_server(Servicer(), server.grpc)
    port = await server.start(NAME, "127.0.0.1", 0)
    try:
        async with rpc.open_channel(f"127.0.0.1:{port}") as channel:
            stub = pb_grpc.CoordinatorServiceStub(channel)
            with pytest.raises(InvalidRequestError, match="1000"), rpc.status_as_errors("x"):
                await stub.Generate(pb.GenerateRequest(text="x" * 1000)).read()
            answer = await stub.Generate(pb.GenerateRequest(text="x" * 900)).read()
            assert len(answer.delta.pieces[0].text) == 900
    finally:
        await server.stop(0)


async def test_a_full_service_is_still_worth_a_retry() -> None:
    async with serving(OverloadedError("message larger than max")) as (_, channel, _):
        with pytest.raises(OverloadedError), rpc.status_as_errors("x"):
            await pb_grpc.CoordinatorServiceStub(channel).Cancel(pb.CancelRequest())


async def test_taken_port_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        server = rpc.Server()
        with pytest.raises(AddressInUseError, match=str(port)):
            await server.start(NAME, "127.0.0.1", port)
        await server.stop(0)


@pytest.mark.parametrize("address", ["", "localhost", ":7070", "localhost:", "localhost:http"])
def test_address_without_port_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        rpc.check_address(address)


def test_addresses_with_port_pass() -> None:
    for address in ("localhost:7070", "127.0.0.1:1", "[::1]:7070", "dns:///name:7070"):
        rpc.check_address(address)
