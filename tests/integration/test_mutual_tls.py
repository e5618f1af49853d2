"""TLS from client to coordinator to verify worker: who gets in, and what a rotation does."""

import asyncio
import datetime
import shutil
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from structlog.testing import capture_logs

from coordinator import decode_link
from coordinator.app import Coordinator
from outrider import messages as m
from outrider import rpc
from outrider.callers import COORDINATOR_NAME, only_named
from outrider.client import AsyncClient, AsyncGeneration, Client, Retry, Status
from outrider.errors import PermissionDeniedError, UnauthenticatedError, UnavailableError
from outrider.pb.v1 import verify_pb2_grpc
from outrider.session.registry import Pool
from outrider.tls import Tls, TlsFiles
from tests.support.certificates import (
    DAY,
    PARTS,
    Authority,
    Pair,
    tls_of,
    write_all,
    write_pair,
)
from tests.support.coordinator_stack import EOS, FakeVerifyWorker, Stack, running_stack, until

HOUR = datetime.timedelta(hours=1)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def directory(tmp_path: Path, authority: Authority) -> Path:
    return write_all(tmp_path, authority)


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_stack() as stack:
        yield stack


async def start(stack: Stack, directory: Path, **settings: Any) -> Coordinator:
    own = tls_of(directory, "coordinator")
    tls = {"tls_ca": own.ca, "tls_cert": own.cert, "tls_key": own.key}
    return await stack.start_coordinator(**tls, **settings)


class SecureVerifyWorker(FakeVerifyWorker):
    """A verify worker that lets in coordinators only, and notes whose certificates it saw."""

    def __init__(self, worker_id: str, directory: Path) -> None:
        super().__init__(worker_id)
        self.seen: list[int] = []
        tls = TlsFiles(tls_of(directory, "verify-worker"))
        checks = [self._note, only_named([COORDINATOR_NAME])]
        self.server = rpc.Server(tls=tls, checks=checks)

    def _note(self, _: str, context: Any) -> None:
        (pem,) = context.auth_context()["x509_pem_cert"]
        self.seen.append(x509.load_pem_x509_certificate(pem).serial_number)


async def add_worker(stack: Stack, directory: Path) -> SecureVerifyWorker:
    worker = SecureVerifyWorker("v1", directory)
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(worker, worker.server.grpc)
    port = await worker.server.start("outrider.v1.VerifyService", "127.0.0.1", 0)
    stack.announce(stack.record(Pool.VERIFY, "v1", address=f"127.0.0.1:{port}"))
    return worker


def client_of(stack: Stack, tls: Tls | None, address: str = "") -> AsyncClient:
    return AsyncClient(address or stack.address, tls=tls, retry=Retry(start_s=0.0))


async def outcome(stack: Stack, tls: Tls | None, address: str = "") -> Exception | None:
    """What a call ends with; None when it is answered."""
    async with client_of(stack, tls, address) as client:
        try:
            await client.list_models()
        except (PermissionDeniedError, UnauthenticatedError, UnavailableError) as error:
            return error
    return None


async def test_who_gets_in_at_a_coordinator(
    stack: Stack, directory: Path, authority: Authority
) -> None:
    await start(stack, directory)
    stranger = Authority()
    own = tls_of(directory, "client")
    pairs = {
        "stranger": stranger.issue_part("client"),
        "expired": authority.issue_part("client", since=-2 * DAY, until=-HOUR),
        "future": authority.issue_part("client", since=HOUR),
        "nameless": authority.issue(),
    }
    for name, pair in pairs.items():
        write_pair(directory, name, pair)
    assert await outcome(stack, own) is None
    # By the name that was given too, whichever address it stands for.
    assert await outcome(stack, own, stack.address.replace("127.0.0.1", "localhost")) is None
    for name in ("stranger", "expired", "future"):
        assert isinstance(await outcome(stack, tls_of(directory, name)), UnavailableError), name
    assert isinstance(await outcome(stack, Tls(ca=own.ca)), UnavailableError)
    assert isinstance(await outcome(stack, None), UnavailableError)
    for part in ("draft-worker", "verify-worker", "coordinator"):
        refused = await outcome(stack, tls_of(directory, part))
        assert isinstance(refused, PermissionDeniedError)
        assert f"{part}.outrider" in refused.message
        assert "who may: client.outrider" in refused.message
    nameless = await outcome(stack, tls_of(directory, "nameless"))
    assert isinstance(nameless, UnauthenticatedError)
    assert "needs a certificate with a name" in nameless.message


async def test_whom_a_client_trusts(stack: Stack, directory: Path, authority: Authority) -> None:
    own = tls_of(directory, "client")
    await start(stack, directory)
    (directory / "another.crt").write_bytes(Authority().cert)
    wrong = Tls(ca=str(directory / "another.crt"), cert=own.cert, key=own.key)
    refused = await outcome(stack, wrong)
    assert isinstance(refused, UnavailableError)
    assert "TLS" in str(refused)
    # Whoever else has a certificate of the authority is noticed by the name.
    misnamed = tls_of(directory, "client", name="elsewhere.outrider")
    assert "Hostname Verification" in str(await outcome(stack, misnamed))
    assert await outcome(stack, tls_of(directory, "client", name=COORDINATOR_NAME)) is None
    expired = authority.issue_part("coordinator", since=-2 * DAY, until=-HOUR)
    write_pair(directory, "coordinator", expired)
    assert isinstance(await outcome(stack, own), UnavailableError)


async def test_patterns_and_clients_without_certificates(stack: Stack, directory: Path) -> None:
    spiffe = Authority()
    other = directory / "spiffe"
    other.mkdir()
    write_all(other, spiffe)
    name = "spiffe://cluster.local/ns/apps/sa/chat"
    write_pair(other, "client", spiffe.issue(name))
    await start(stack, other, allow_peer=("spiffe://cluster.local/ns/apps/*",))
    assert await outcome(stack, tls_of(other, "client")) is None
    write_pair(other, "client", spiffe.issue("spiffe://cluster.local/ns/elsewhere/sa/chat"))
    assert isinstance(await outcome(stack, tls_of(other, "client")), PermissionDeniedError)
    await start(stack, directory, tls_client_auth="none", worker_id="c2")
    assert await outcome(stack, Tls(ca=str(directory / "ca.crt"))) is None
    assert isinstance(await outcome(stack, None), UnavailableError)


async def test_a_worker_of_another_role_is_not_taken_for_a_verify_worker(
    stack: Stack, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes to Redis can name an address; the certificate there has to fit."""
    opened: list[str] = []
    open_channel = rpc.open_channel

    def counting(address: str, *more: Any) -> Any:
        opened.append(address)
        return open_channel(address, *more)

    monkeypatch.setattr(decode_link.rpc, "open_channel", counting)
    shutil.copy(directory / "draft-worker.crt", directory / "verify-worker.crt")
    shutil.copy(directory / "draft-worker.key", directory / "verify-worker.key")
    worker = await add_worker(stack, directory)
    with capture_logs() as logs:
        await start(stack, directory)
        await until(lambda: bool(told(logs)), "the log says why")
        assert worker.seen == []
        assert "Hostname Verification" in told(logs)[0]["why"]
        status = await status_of(stack, directory)
        assert [found.connected for found in status.workers] == [False]
        # It is tried again, and told no more.
        await until(lambda: len(opened) >= 3, "more tries")
        assert len(told(logs)) == 1
    await worker.server.stop(0)


def told(logs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [line for line in logs if line["event"] == "no stream to a verify worker"]


async def status_of(stack: Stack, directory: Path) -> Status:
    async with client_of(stack, tls_of(directory, "client")) as client:
        return await client.status()


async def test_certificates_change_under_load(
    stack: Stack, directory: Path, authority: Authority
) -> None:
    """Authority and pairs are replaced file by file; no call fails and no stream breaks."""
    worker = await add_worker(stack, directory)
    await start(stack, directory)
    former = directory / "former"
    former.mkdir()
    for name in ("ca.crt", "client.crt", "client.key"):
        shutil.copy(directory / name, former / name)
    async with client_of(stack, tls_of(directory, "client")) as client:
        streams = [client.generate("ab", session_id=f"s{n}") for n in range(3)]
        texts = [asyncio.create_task(read(stream)) for stream in streams]
        said = 0

        async def go_on() -> None:
            """Every session gets one token more."""
            nonlocal said
            for n in range(3):
                begun = worker.of(m.StartSession, f"s{n}")[-1]
                worker.say(worker.progress(begun, "x", base_len=begun.prompt_len + said))
            said += 1

        for n in range(3):
            await worker.started(f"s{n}")
        load = asyncio.create_task(keep_asking(client))
        successor = Authority("successor")
        await go_on()
        (directory / "ca.crt").write_bytes(authority.cert + successor.cert)
        await go_on()
        pairs = {part: successor.issue_part(part) for part in PARTS}
        for part, pair in pairs.items():
            write_pair(directory, part, pair)
            await go_on()
        await shown(directory, stack, pairs["coordinator"])
        (directory / "ca.crt").write_bytes(successor.cert)
        await go_on()
        # Connections that were there go on; new ones are made with the new files.
        assert pairs["coordinator"].serial not in worker.seen
        worker.end_stream()
        for n in range(3):
            await worker.started(f"s{n}", times=2)
        assert worker.seen[-1] == pairs["coordinator"].serial
        assert await outcome(stack, tls_of(directory, "client")) is None
        assert isinstance(await outcome(stack, tls_of(former, "client")), UnavailableError)
        for n in range(3):
            begun = await worker.started(f"s{n}", times=2)
            worker.say(worker.progress(begun, [EOS]))
        assert await asyncio.gather(*texts) == ["x" * said] * 3
        load.cancel()
        answered = (await asyncio.gather(load, return_exceptions=True))[0]
        assert isinstance(answered, asyncio.CancelledError), answered
    await worker.server.stop(0)


async def test_a_client_that_lives_on_connects_with_the_new_files(
    stack: Stack, directory: Path
) -> None:
    coordinator = await start(stack, directory)
    tls = tls_of(directory, "client")
    with Client(stack.address, tls=tls) as synchronous:
        async with client_of(stack, tls) as client:
            await client.list_models()
            await asyncio.to_thread(synchronous.list_models)
            await coordinator.stop()
            write_all(directory, Authority("successor"))
            port = int(stack.address.rpartition(":")[2])
            await start(stack, directory, port=port, worker_id="c2")
            await client.list_models()
            await asyncio.to_thread(synchronous.list_models)


async def read(stream: AsyncGeneration) -> str:
    return "".join([chunk.text async for chunk in stream])


async def keep_asking(client: AsyncClient) -> None:
    while True:
        await client.list_models()
        await asyncio.sleep(0.005)


async def shown(directory: Path, stack: Stack, pair: Pair) -> None:
    """Make sure that a new connection to the coordinator is shown this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, _, port = stack.address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    assert x509.load_der_x509_certificate(der).serial_number == pair.serial
