"""Tokens: no call without one, no call that is not the holder's to make, nobody else's sessions."""

from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs

from coordinator.access import TENANT_CALLS
from outrider import rpc
from outrider.client import AsyncClient
from outrider.errors import (
    InvalidRequestError,
    NotFoundError,
    OutriderError,
    PermissionDeniedError,
    SessionExistsError,
    UnauthenticatedError,
    UnknownSessionError,
)
from outrider.pb.v1 import coordinator_pb2 as pb
from outrider.tokens import Role, append, new_token
from tests.support.coordinator_stack import EOS, Stack, running_stack, token_ids

SERVICE = pb.DESCRIPTOR.services_by_name["CoordinatorService"]
# What is for admins alone. A new rpc is to be in one of the two.
ADMIN_CALLS = {"GetStatus", "DrainWorker"}


class Tokens:
    """A tokens file with a token of each kind."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "tokens"
        self.acme = self.add("acme")
        self.rival = self.add("rival")
        self.admin = self.add("ops", Role.ADMIN)
        self.unknown, _ = new_token("acme", Role.ADMIN)

    def add(self, tenant: str, role: Role = Role.TENANT) -> str:
        token, holder = new_token(tenant, role)
        append(str(self.path), holder)
        return token


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    return Tokens(tmp_path)


@pytest.fixture
async def stack(tokens: Tokens) -> AsyncIterator[Stack]:
    async with running_stack() as stack:
        await stack.start_coordinator(tokens=(str(tokens.path),))
        yield stack


def bearer(token: str, tenant: str | None = None) -> list[tuple[str, str]]:
    named = [] if tenant is None else [("outrider-tenant", tenant)]
    return [*named, ("authorization", f"Bearer {token}")]


async def refusal(
    stack: Stack, method: MethodDescriptor, metadata: Sequence[tuple[str, str]]
) -> OutriderError:
    """What a call with an empty request ends with."""
    call_of: Callable[..., Any] = getattr(stack.client, method.name)
    request = message_factory.GetMessageClass(method.input_type)()
    try:
        call = call_of(request, metadata=metadata, timeout=10)
        if method.server_streaming:
            async for _ in call:
                pass
        else:
            await call
    except grpc.RpcError as error:
        return rpc.error_of(error, "the coordinator")
    raise AssertionError(f"{method.name} was not refused")


def test_every_call_is_for_tenants_or_for_admins() -> None:
    assert {method.name for method in SERVICE.methods} == TENANT_CALLS | ADMIN_CALLS
    assert not TENANT_CALLS & ADMIN_CALLS


async def test_no_call_without_a_token_that_is_good_for_it(stack: Stack, tokens: Tokens) -> None:
    with capture_logs() as logs:
        for method in SERVICE.methods:
            missing = [
                [],
                [("authorization", tokens.acme)],
                [("authorization", f"Basic {tokens.acme}")],
                [("authorization", "Bearer ")],
                [("outrider-tenant", "acme")],
            ]
            for metadata in missing:
                error = await refusal(stack, method, metadata)
                assert type(error) is UnauthenticatedError, (method.name, metadata)
                assert "a token is needed" in error.message
            wrong = await refusal(stack, method, bearer(tokens.unknown))
            assert type(wrong) is UnauthenticatedError, method.name
            other = await refusal(stack, method, bearer(tokens.acme, "rival"))
            assert type(other) is PermissionDeniedError, method.name
            if method.name in ADMIN_CALLS:
                denied = await refusal(stack, method, bearer(tokens.acme))
                assert type(denied) is PermissionDeniedError, method.name
                assert "role admin" in denied.message
            elif method.name != "ListModels":
                # It is let in, and then the empty request is no good.
                let_in = await refusal(stack, method, bearer(tokens.acme, "acme"))
                assert isinstance(let_in, InvalidRequestError | NotFoundError), method.name
    said = str(logs)
    assert not any(t in said for t in (tokens.acme, tokens.rival, tokens.admin, tokens.unknown))


async def test_reflection_needs_a_token_and_health_needs_none(stack: Stack, tokens: Tokens) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(stack.channel)
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    with pytest.raises(grpc.RpcError) as caught:
        async for _ in stub.ServerReflectionInfo(iter([ask])):
            pass
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    async for answer in stub.ServerReflectionInfo(iter([ask]), metadata=bearer(tokens.admin)):
        assert SERVICE.full_name in str(answer)
    health = stack.channel.unary_unary("/grpc.health.v1.Health/Check")
    assert await health(b"") in (b"\x08\x01", b"\x08\x02")  # serving, or not yet


async def test_admins_see_and_drain_and_a_line_taken_out_ends_a_token(
    stack: Stack, tokens: Tokens
) -> None:
    await stack.add_verify()
    async with AsyncClient(stack.address, token=tokens.admin) as admin:
        assert (await admin.status()).redis_reachable
        assert await admin.drain("v1") == 0
        lines = tokens.path.read_text().splitlines(keepends=True)
        tokens.path.write_text("".join(lines[:-1]))
        with pytest.raises(UnauthenticatedError, match="not any more"):
            await admin.status()
    async with AsyncClient(stack.address, token=tokens.acme, tenant="acme") as client:
        assert [model.name for model in await client.list_models()] == ["bytes"]


async def test_sessions_of_a_tenant_are_nobody_elses(stack: Stack, tokens: Tokens) -> None:
    worker = await stack.add_verify()
    mine = stack.client.Generate(
        pb.GenerateRequest(session_id="s", text="ab", idempotency_key="k"),
        metadata=bearer(tokens.acme),
    )
    start = await worker.started()
    async with (
        AsyncClient(stack.address, token=tokens.acme) as acme,
        AsyncClient(stack.address, token=tokens.rival) as rival,
        AsyncClient(stack.address, token=tokens.admin) as admin,
    ):
        for others in (rival, admin):
            # While it runs: not read, not cancelled, not resumed, not begun again by its key.
            with pytest.raises(UnknownSessionError):
                await others.get_session("s")
            with pytest.raises(UnknownSessionError):
                await others.cancel("s")
        again = pb.GenerateRequest(session_id="s", text="ab", idempotency_key="k")
        with pytest.raises(SessionExistsError):
            await until_end(stack.client.Generate(again, metadata=bearer(tokens.rival)))
        resume = pb.ResumeRequest(session_id="s")
        with pytest.raises(UnknownSessionError):
            await until_end(stack.client.Resume(resume, metadata=bearer(tokens.rival)))
        # A tenant that the call names by itself changes nothing.
        with pytest.raises(PermissionDeniedError):
            await until_end(stack.client.Resume(resume, metadata=bearer(tokens.rival, "acme")))
        worker.say(worker.progress(start, [*token_ids("xy"), EOS]))
        await until_end(mine)
        # Nor when it has ended.
        with pytest.raises(UnknownSessionError):
            await rival.get_session("s")
        with pytest.raises(UnknownSessionError):
            await rival.complete("cd", previous_session_id="s")
        assert (await acme.get_session("s")).token_ids == (*token_ids("xy"), EOS)


async def until_end(call: Any) -> None:
    """Read a stream to its end."""
    with rpc.status_as_errors("the coordinator"):
        async for _ in call:
            pass
