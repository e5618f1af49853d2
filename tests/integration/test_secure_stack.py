"""The whole system as processes with all of it on: mTLS, tokens, Redis over TLS with own users."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf import message_factory
from google.protobuf.descriptor import ServiceDescriptor
from valkey import Valkey

from outrider import rpc
from outrider.client import AsyncClient
from outrider.errors import OutriderError, PermissionDeniedError, RecordsUnavailableError
from outrider.local.commands import StackSettings, part_tls
from outrider.local.stack import LocalStack
from outrider.messages import AcceptanceRule
from outrider.pb.v1 import coordinator_pb2, draft_pb2, verify_pb2
from outrider.session.acl import RIGHTS, rules, user_name
from outrider.session.policy import PolicyStore
from outrider.session.redis import connect
from outrider.session.redis_tls import RedisTls
from outrider.tls import TlsFiles
from outrider.tokens import Role, append, new_token
from tests.support.certificates import PARTS, Authority, write_all
from tests.support.models import plain_greedy, save_model
from tests.support.tls_proxy import tls_proxy
from tests.support.valkey import new_valkey

pytestmark = [pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]
NEW_TOKENS = 24
PROMPT = [7, 8, 9, 10] * 6
PASSWORDS = {part: f"password-of-{part}" for part in RIGHTS}
# Who may call whom; clients may call the coordinator.
CALLERS = {"coordinator": "client", "verify-worker": "coordinator", "draft-worker": "verify-worker"}
SERVICES: dict[str, ServiceDescriptor] = {
    "coordinator": coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"],
    "verify-worker": verify_pb2.DESCRIPTOR.services_by_name["VerifyService"],
    "draft-worker": draft_pb2.DESCRIPTOR.services_by_name["DraftService"],
}


@dataclass(frozen=True)
class Secured:
    """What is up, and what is secret about it."""

    stack: LocalStack
    directory: Path
    valkey_port: int
    redis_port: int
    model: Path
    tokens: dict[str, str]

    def client(self, who: str) -> AsyncClient:
        name = "coordinator.outrider"
        tls = part_tls(self.directory, "client", name=name)
        return AsyncClient(self.stack.address, token=self.tokens[who], tls=tls)

    def redis_url(self, part: str) -> str:
        return f"rediss://{user_name(part)}@127.0.0.1:{self.redis_port}/0"

    def redis_flags(self, part: str) -> tuple[str, ...]:
        return redis_flags(self.directory, part, self.redis_url(part))

    @property
    def root(self) -> Valkey:
        return Valkey(port=self.valkey_port, username="root", password="root")


def redis_flags(directory: Path, part: str, url: str) -> tuple[str, ...]:
    return "--redis-url", url, "--redis-password-file", str(directory / f"{part}.password")


def make_users(directory: Path, port: int) -> None:
    with Valkey(port=port) as first:
        for part, password in PASSWORDS.items():
            (directory / f"{part}.password").write_text(f"{password}\n")
            first.execute_command("ACL", "SETUSER", user_name(part), *rules(part, password))
        first.execute_command("ACL", "SETUSER", "root", "on", ">root", "~*", "&*", "+@all")
        first.execute_command("ACL", "SETUSER", "default", "off")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def secured(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Secured]:
    directory = write_all(tmp_path_factory.mktemp("tls"), Authority())
    model = save_model(tmp_path_factory.mktemp("target"))
    tokens: dict[str, str] = {}
    for who, role in {"acme": Role.TENANT, "rival": Role.TENANT, "ops": Role.ADMIN}.items():
        tokens[who], holder = new_token(who, role)
        append(str(directory / "tokens"), holder)
    server = new_valkey()
    server.start()
    make_users(directory, server.port)
    try:
        async with tls_proxy(directory, "coordinator", server.port) as redis_port:
            url = f"rediss://{user_name('coordinator')}@127.0.0.1:{redis_port}/0"

            def own(part: str) -> tuple[str, ...]:
                return redis_flags(directory, part, url.replace("coordinator", part))

            ca, cert, key = (str(directory / f) for f in ("ca.crt", "client.crt", "client.key"))
            settings = StackSettings(
                model=str(model),
                drafter="suffix",
                threads=1,
                redis_url=url,
                redis_flags=("--redis-ca", ca, "--redis-cert", cert, "--redis-key", key),
                tls_dir=directory,
                tokens=str(directory / "tokens"),
                coordinator_flags=own("coordinator"),
                verify_flags=(*own("verify-worker"), "--draft-wait-s", "60"),
                draft_flags=own("draft-worker"),
                log_level="debug",
            )
            async with LocalStack(settings) as stack:
                yield Secured(stack, directory, server.port, redis_port, model, tokens)
    finally:
        server.terminate()


async def test_everything_works_with_no_more_rights_than_given(secured: Secured) -> None:
    expected = plain_greedy(secured.model, PROMPT, NEW_TOKENS)
    request: dict[str, Any] = {"token_ids": PROMPT, "max_tokens": NEW_TOKENS}
    async with secured.client("acme") as client, secured.client("ops") as ops:
        done = await client.complete(session_id="one", speculation=4, **request)
        assert list(done.token_ids) == expected
        assert done.speculation.draft_tokens > 0
        info = await client.get_session("one")
        assert list(info.token_ids) == expected
        more = await client.complete("x", previous_session_id="one", max_tokens=4)
        assert more.usage.completion_tokens
        stream = client.generate(session_id="two", **request)
        async for _ in stream:
            assert await client.cancel("two")
            break
        drafter = next(w for w in (await ops.status()).workers if w.pool == "draft")
        await ops.drain(drafter.worker_id)
        await ops.drain(drafter.worker_id, draining=False)
    async with redis_as(secured, "operator") as redis:
        store = PolicyStore(redis)
        await store.change(rule=AcceptanceRule.COUPLED)
        found = await store.read()
        assert found is not None
        assert found.version == 1
    # What was refused to anybody would be here.
    with secured.root as root:
        denied = root.execute_command("ACL", "LOG")
        assert denied == [], denied


def redis_as(secured: Secured, part: str) -> Any:
    """A connection as the user of a part."""
    directory = secured.directory
    tls = RedisTls(*(str(directory / f) for f in ("ca.crt", "client.crt", "client.key")))
    password_file = str(directory / f"{part}.password")
    return connect(secured.redis_url(part), password_file=password_file, tls=tls)


FOR_NOBODY = ("FLUSHALL", "KEYS *", "CONFIG GET *", "SCAN 0", "ACL LIST", "SWAPDB 0 1", "GET x")
NOT_FOR_WORKERS = (
    "EVAL return(1) 0",
    "HGETALL outrider:{s}:session",
    "GET outrider:{s}:tokens",
    "HSET outrider:policy speculation off",
    "DEL outrider:workers:verify",
    "SADD outrider:worker:draft:x y",
)
NOT_FOR_DRAFT_WORKERS = (
    "HSET outrider:worker:verify:x address evil:1",
    "SADD outrider:workers:verify outrider:worker:verify:x",
    "SREM outrider:workers:verify outrider:worker:verify:x",
    "ZADD outrider:prefix:f:h 1 x",
)


async def test_nobody_may_do_what_is_not_theirs(secured: Secured) -> None:
    refused = {
        "coordinator": (*FOR_NOBODY, "DEL outrider:policy", "SMEMBERS x"),
        "operator": (*FOR_NOBODY, "HGETALL outrider:{s}:session", "DEL outrider:policy"),
        "verify-worker": (*FOR_NOBODY, *NOT_FOR_WORKERS),
        "draft-worker": (*FOR_NOBODY, *NOT_FOR_WORKERS, *NOT_FOR_DRAFT_WORKERS),
    }
    assert set(refused) == set(RIGHTS)
    for part, commands in refused.items():
        async with redis_as(secured, part) as redis:
            await redis.ping()
            for command in commands:
                with pytest.raises(RecordsUnavailableError, match="refuses this user"):
                    await redis.command(*command.split())
    with secured.root as root:
        root.execute_command("ACL", "LOG", "RESET")


async def test_redis_is_reached_with_the_right_certificates_only(secured: Secured) -> None:
    own = [str(secured.directory / f) for f in ("ca.crt", "client.crt", "client.key")]
    stranger = secured.directory / "stranger.crt"
    stranger.write_bytes(Authority().cert)
    password_file = str(secured.directory / "coordinator.password")
    for tls in (RedisTls(own[0]), RedisTls(str(stranger), *own[1:]), RedisTls("", *own[1:])):
        url = secured.redis_url("coordinator")
        async with connect(url, password_file=password_file, tls=tls) as redis:
            with pytest.raises(RecordsUnavailableError, match="does not answer"):
                await redis.ping()


async def outcome(secured: Secured, address: str, part: str, service: ServiceDescriptor) -> Any:
    """What every rpc of a service ends with for a caller with a part's certificate."""
    found: list[OutriderError | None] = []
    called = next(name for name, known in SERVICES.items() if known is service)
    tls = TlsFiles(part_tls(secured.directory, part, name=f"{called}.outrider"))
    token = (("authorization", f"Bearer {secured.tokens['ops']}"),)
    async with rpc.open_channel(address, tls) as channel:
        for method in service.methods:
            kinds: dict[tuple[bool, bool], Callable[..., Any]] = {
                (False, False): channel.unary_unary,
                (False, True): channel.unary_stream,
                (True, False): channel.stream_unary,
                (True, True): channel.stream_stream,
            }
            request = message_factory.GetMessageClass(method.input_type)()
            data = request.SerializeToString()
            make = kinds[method.client_streaming, method.server_streaming]
            # Refused before anything is sent: grpc may forget the reason while it is written to.
            sent = iter([data] if part == CALLERS[called] else [])
            call = make(f"/{service.full_name}/{method.name}")(
                sent if method.client_streaming else data, metadata=token, timeout=10
            )
            try:
                if method.server_streaming:
                    await call.read()
                    call.cancel()
                else:
                    await call
                found.append(None)
            except grpc.RpcError as error:
                found.append(rpc.error_of(error, address))
    return found


async def test_only_the_right_role_may_call_each_service(secured: Secured) -> None:
    async with secured.client("ops") as ops:
        workers = (await ops.status()).workers
    addresses = {f"{worker.pool}-worker": worker.address for worker in workers}
    addresses["coordinator"] = secured.stack.address
    for called, service in SERVICES.items():
        for part in PARTS:
            outcomes = await outcome(secured, addresses[called], part, service)
            assert len(outcomes) == len(service.methods)
            denied = [isinstance(error, PermissionDeniedError) for error in outcomes]
            assert denied == [part != CALLERS[called]] * len(outcomes), (called, part, outcomes)


async def test_the_command_line_has_the_same_settings(secured: Secured) -> None:
    tls = part_tls(secured.directory, "client")
    token_file = secured.directory / "acme.token"
    token_file.write_text(f"{secured.tokens['acme']}\n")
    command = [sys.executable, "-m", "outrider", "generate", "abc", "--json", "--max-tokens", "4"]
    command += ["--coordinator", secured.stack.address, "--token-file", str(token_file)]
    command += ["--tls-ca", tls.ca, "--tls-cert", tls.cert, "--tls-key", tls.key]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert json.loads(done.stdout)["usage"]["completion_tokens"]


async def test_no_secret_is_in_a_log_a_command_line_or_an_environment(secured: Secured) -> None:
    secrets = [*secured.tokens.values(), *PASSWORDS.values(), "PRIVATE KEY"]
    processes = secured.stack.processes
    assert set(processes) == {"coordinator", "verify-1", "draft-1"}
    for process in processes.values():
        log = process.log_path.read_text()
        assert log
        seen = log + read_of(process.pid, "cmdline") + read_of(process.pid, "environ")
        assert [secret for secret in secrets if secret in seen] == [], process.name


def read_of(pid: int, what: str) -> str:
    return Path(f"/proc/{pid}/{what}").read_text()
