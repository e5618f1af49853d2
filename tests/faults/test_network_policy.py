"""The chart's NetworkPolicies in a real network: a namespace for each pod, the kernel's filter.

The services are started with the chart's command lines, find Redis by the name of its Service, and
answer a request with drafts; all of it under the policies of the chart and nothing else.
"""

import asyncio
import errno
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bench.load import LETTERS
from bench.pods import COMPONENT, MODEL, NAMESPACE, Manifest, Pod, pods, render
from bench.tiny import write_model
from outrider.local.commands import Commands, StackSettings
from outrider.local.process import ChildProcess
from tests.support.collector import Spans, collector
from tests.support.name_server import PORT as DNS
from tests.support.name_server import name_server
from tests.support.namespaces import Host, Network, forbidden
from tests.support.packet_filter import Allowed, connections, restrict
from tests.support.policies import NAMESPACE_NAME, Place, chooses, restrictions

pytestmark = pytest.mark.skipif(bool(forbidden()), reason=forbidden())

DOMAIN = "svc.cluster.local"
REDIS, OTLP, METRICS, OTHER = 6379, 4317, 9464, 8080
PORTS = {"coordinator": 7070, "verify-worker": 7071, "draft-worker": 7072}
# Those outside the release: where they are, and where they listen.
OUTSIDE = {
    "client": ("apps", OTHER),
    "stranger": ("default", OTHER),
    "prometheus": ("monitoring", OTHER),
    "collector": ("telemetry", OTLP),
    "dns": ("kube-system", DNS),
}
ACCEPTED = "outrider_spec_decode_num_accepted_tokens_total"
PATIENCE_S = 60.0
# Long enough for a draft to come in time.
STEP_S = "0.02"


def from_namespace(name: str) -> Manifest:
    return {"namespaceSelector": {"matchLabels": {NAMESPACE_NAME: name}}}


def values(model: Path) -> Manifest:
    """Two models, of which the second is there to be kept apart, and all that can be reached."""
    return {
        "models": {"main": {"target": str(model)}, "small": {"target": "/models/small"}},
        "telemetry": {"otlpEndpoint": f"http://collector.telemetry:{OTLP}"},
        "networkPolicy": {
            "clientsFrom": [from_namespace("apps")],
            "otlpTo": [from_namespace("telemetry")],
        },
        "coordinator": {"replicas": 1},
        "verify": {"flags": {"threads": 1, "kv-memory": "64MiB", "k": "fixed:4"}},
        "draft": {"replicas": 1},
    }


def arrows() -> set[tuple[str, str, int]]:
    """Who may reach whom, where: the design's."""
    found = set()
    for model in ("main", "small"):
        coordinator, verify, draft = (f"{model}-{service}" for service in PORTS)
        found |= {
            ("client", coordinator, 7070),
            (coordinator, verify, 7071),
            (verify, draft, 7072),
        }
        for pod in (coordinator, verify, draft):
            found |= {(pod, "redis", REDIS), (pod, "dns", DNS), (pod, "collector", OTLP)}
            found.add(("prometheus", pod, METRICS))
    return found


@dataclass
class World:
    """Every pod with the host that it has for itself."""

    objects: list[Manifest]
    directory: Path
    hosts: dict[str, Host] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    running: dict[str, ChildProcess] = field(default_factory=dict)

    @property
    def pods(self) -> dict[str, Pod]:
        """The release's, but for Redis."""
        return {f"{pod.labels[MODEL]}-{pod.service}": pod for pod in pods(self.objects)}

    def settle(self, network: Network) -> None:
        """Give everybody a host and an address."""
        redis = next(
            item["spec"]["template"]["metadata"]["labels"]
            for item in self.objects
            if item["kind"] == "Deployment"
            and item["spec"]["selector"]["matchLabels"][COMPONENT] == "redis"
        )
        labels: dict[str, Mapping[str, str]] = {n: pod.labels for n, pod in self.pods.items()}
        for name, found in (labels | {"redis": redis}).items():
            self._settle(network, name, NAMESPACE, found)
        for name, (namespace, _) in OUTSIDE.items():
            self._settle(network, name, namespace, {})
        for service in (item for item in self.objects if item["kind"] == "Service"):
            selector = {"matchLabels": service["spec"]["selector"]}
            chosen = [p for p in self.places.values() if chooses(selector, p.labels)]
            self.names[f"{service['metadata']['name']}.{NAMESPACE}.{DOMAIN}"] = chosen[0].address
        self.names[f"collector.telemetry.{DOMAIN}"] = self.hosts["collector"].address

    def _settle(
        self, network: Network, name: str, namespace: str, labels: Mapping[str, str]
    ) -> None:
        self.hosts[name] = host = network.add_host()
        self.places[name] = Place(name, namespace, labels, host.address)

    def restrict(self) -> dict[str, dict[str, list[Allowed]]]:
        """Put the policies into force; what they allow each pod."""
        policies = [item for item in self.objects if item["kind"] == "NetworkPolicy"]
        everybody = list(self.places.values())
        allowed = {}
        for name, place in self.places.items():
            allowed[name] = restrictions(policies, NAMESPACE, place, everybody)
            for direction, rules in allowed[name].items():
                restrict(self.hosts[name], direction, rules)
        return allowed

    def unused(self, allowed: Mapping[str, Mapping[str, list[Allowed]]]) -> list[str]:
        """What was allowed to the pods that run, and nobody has made use of."""
        names = {place.address: name for name, place in self.places.items()}
        found = []
        for name in self.running:
            for direction, rules in allowed[name].items():
                counts = connections(self.hosts[name], direction)
                for rule, count in zip(rules, counts, strict=True):
                    if not count and not names[rule.peer].startswith("small"):
                        peer = f"{names[rule.peer]}:{rule.port}/{rule.protocol}"
                        found.append(f"{name} {direction} {peer}")
        return found

    async def run(self, name: str, command: list[str]) -> ChildProcess:
        """Start a command on a host."""
        resolv_conf = self.directory / "resolv.conf"
        search = f"{NAMESPACE}.{DOMAIN} {DOMAIN}"
        server = self.hosts["dns"].address
        resolv_conf.write_text(f"nameserver {server}\nsearch {search}\noptions ndots:5\n")
        inside = self.hosts[name].command(resolv_conf, command, sys.executable)
        child = await ChildProcess.start(name, inside, self.directory / f"{name}.log")
        self.running[name] = child
        return child

    async def connects(self, source: str, target: str, port: int) -> bool:
        """Whether a connection comes about; if not, it was a policy that was against it."""
        sock = self.hosts[source].open()
        address = (self.hosts[target].address, port)
        with sock:
            try:
                async with asyncio.timeout(10):
                    await asyncio.get_running_loop().sock_connect(sock, address)
            except OSError as error:
                # Of the filter; a door that is not open would say something else.
                if error.errno != errno.EHOSTUNREACH:
                    raise
                return False
        return True

    async def metric(self, name: str, wanted: str) -> float:
        """A counter of a pod, as Prometheus gets it."""
        sock = self.hosts["prometheus"].open()
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, (self.hosts[name].address, METRICS))
        reader, writer = await asyncio.open_connection(sock=sock)
        writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
        page = (await reader.read()).decode()
        writer.close()
        assert "# TYPE" in page
        lines = [line for line in page.splitlines() if line.startswith(wanted)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def log(self, name: str) -> str:
        return self.running[name].log_path.read_text()

    async def says(self, name: str, what: str) -> None:
        await until(lambda: what in self.log(name), lambda: self.log(name))


@asynccontextmanager
async def running(world: World) -> AsyncIterator[Spans]:
    """The release's own processes, and what it needs from outside."""
    async with AsyncExitStack() as stack:
        network = stack.enter_context(Network())
        world.settle(network)
        await stack.enter_async_context(name_server(world.hosts["dns"], world.names))
        host = world.hosts["collector"]
        _, spans = await stack.enter_async_context(
            collector(f"{host.address}:{OTLP}", inside=host.inside())
        )
        # The second model, and whoever is outside, only have open doors.
        for name, pod in world.pods.items():
            if name.startswith("small"):
                for port in (PORTS[pod.service], METRICS):
                    stack.enter_context(world.hosts[name].listen(port))
        for name in ("client", "stranger", "prometheus"):
            stack.enter_context(world.hosts[name].listen(OTHER))
        yield spans
        for child in world.running.values():
            await child.kill()


async def until(true: Callable[[], bool], otherwise: Callable[[], str]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline_s, otherwise()
        await asyncio.sleep(0.05)


async def start_all(world: World) -> None:
    """Redis and the first model's pods, until all of them serve."""
    redis = Commands(StackSettings(model="")).valkey(REDIS, world.directory)
    await world.run("redis", [*redis, "--bind", "0.0.0.0", "--protected-mode", "no"])
    for name, pod in world.pods.items():
        if name.startswith("main"):
            module = [pod.service.replace("-", "_")]
            if pod.service == "verify-worker":
                module = ["bench.paced_worker", STEP_S]
            arguments = pod.arguments(name, world.hosts[name].address)
            await world.run(name, [sys.executable, "-m", *module, *arguments])
    for name in ("verify-worker", "draft-worker"):
        await world.says(f"main-{name}", "serving")
    await world.says("main-coordinator", "listening")


async def generate(world: World) -> str:
    """What a client of the cluster gets for an answer, by the name of the Service."""
    coordinator = next(name for name in world.names if "-coordinator-all." in name)
    flags = ["--coordinator", f"{coordinator.partition('.')[0]}.{NAMESPACE}:7070", "--json"]
    asked = ["generate", "abcabcabc", "--max-tokens", "150", *flags]
    (world.directory / "client.log").unlink(missing_ok=True)
    client = await world.run("client", [sys.executable, "-m", "outrider", *asked])
    assert await client.wait() == 0, world.log("client")
    text: str = json.loads(world.log("client"))["text"]
    return text


@pytest.mark.timeout(240)
async def test_policies_allow_what_the_system_needs_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model", letters=LETTERS)
    # Soon, and not when a minute is over.
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "500")
    world = World(render(values(model)), tmp_path)
    async with running(world) as spans:
        everything = [
            (n, port) for n, pod in world.pods.items() for port in (PORTS[pod.service], METRICS)
        ]
        allowed = world.restrict()
        await start_all(world)

        # The system works: a request with drafts, its traces, and the metrics of all parts.
        async with asyncio.timeout(PATIENCE_S):
            assert await generate(world)
            while not await world.metric("main-verify-worker", ACCEPTED):
                assert await generate(world)
        assert await world.metric("main-coordinator", "outrider_") > 0
        assert await world.metric("main-draft-worker", "outrider_") > 0
        await until(lambda: bool(spans.trace_ids), lambda: "no traces")

        # Every rule was needed for that, or is for what comes every now and then.
        await until(lambda: not world.unused(allowed), lambda: f"unused: {world.unused(allowed)}")

        # Nothing else is possible, by any port that is open.
        everything += [("redis", REDIS), *((n, port) for n, (_, port) in OUTSIDE.items())]
        possible = {
            (source, target, port)
            for source in world.places
            for target, port in everything
            if source != target
            and not {source, target} <= set(OUTSIDE)
            and await world.connects(source, target, port)
        }
        assert possible == arrows()
