"""What `python -m bench probes` does to pods, and what it then sees of them."""

import asyncio
import math
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.kubelet import Event, Kubelet, until
from bench.load import Load
from bench.pods import LIVENESS, READINESS, STARTUP
from bench.release import Release, values_for
from bench.report import progress
from bench.unwell import HANG
from outrider.client import GenerateOptions
from outrider.rpc import LIVENESS as ALIVE

DIFFERENT, AT_ONCE, NEW_TOKENS = 12, 6, 64
LOAD_S, NEVER_S, STARTUP_S = 180.0, 1e9, 240
PACE_S = 0.03
CONTEXT, CHUNK = 2048, 16
# Of the services, as they are by default.
SILENCE_S = {"verify-worker": 5.0, "draft-worker": 30.0}
LEAST_SILENCE_S = 1.0
# How many times as long as it should take something may take, on a busy machine.
PATIENCE = 6.0
LEAST_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Ended:
    """A container that a failed probe has ended: why, and after how long, in a cluster's time.

    allowed_s: how long that may take by the chart and the service's settings. unready: whether the
        pod was taken for unready before.
    """

    pod: str
    answer: str
    seconds: float
    allowed_s: float
    unready: bool


@dataclass(slots=True)
class Loading:
    """What became of pods whose models load slowly.

    failed: startup probes that failed before the first that did not, by pod. early: pods that
    were ready before. restarts: of all of them. never_s: when the container that loads for ever
    was ended, in a cluster's time; inf if it was not.
    """

    failed: dict[str, int] = field(default_factory=dict)
    early: list[str] = field(default_factory=list)
    restarts: int = 0
    never_s: float = math.inf


@dataclass(slots=True)
class Drain:
    """How a pod ended: what its health said, in order, and the exit code."""

    pod: str
    readiness: list[str]
    liveness: list[str]
    code: int

    @property
    def in_order(self) -> bool:
        """Not ready from some time on, alive all the time, and no complaint in the end."""
        said = self.readiness, self.liveness
        return self.code == 0 and said == (["SERVING", "NOT_SERVING"], ["SERVING"])


@dataclass(slots=True)
class Outcome:
    """What was seen; `load` and `expected` are the completions under it all, and undisturbed."""

    prefill_s: float = 0.0
    patience_s: float = 0.0
    failed_in_prefill: dict[str, int] = field(default_factory=dict)
    hung: list[Ended] = field(default_factory=list)
    stopped: list[Ended] = field(default_factory=list)
    drained: list[Drain] = field(default_factory=list)
    restarts: dict[str, int] = field(default_factory=dict)
    load: Load = field(default_factory=lambda: Load(NEW_TOKENS, DIFFERENT))
    expected: Load = field(default_factory=lambda: Load(NEW_TOKENS, DIFFERENT))

    @property
    def different(self) -> list[int]:
        """The requests that said something else than before."""
        said = self.load.said
        return [n for n, texts in said.items() if texts != self.expected.said[n % DIFFERENT]]

    @property
    def restarted_for_nothing(self) -> list[str]:
        """Pods with another number of restarts than failures that were made."""
        ended = Counter(one.pod for one in (*self.hung, *self.stopped))
        return [name for name, times in self.restarts.items() if times != ended[name]]


def silence_s(service: str, speed: float) -> float:
    """How long its engine may hang before the service says so; 0 of one without an engine."""
    whole = SILENCE_S.get(service, 0.0)
    return max(whole / speed, LEAST_SILENCE_S) if whole else 0.0


async def load_slowly(model: Path, speed: float) -> Loading:
    """One pod of each service, and a verify worker that never gets ready."""
    found = Loading()
    never = values_for(model, {"verify": {"startupSeconds": STARTUP_S}})
    async with (
        Release(values_for(model, {}), speed=speed, load_s=LOAD_S / speed) as release,
        Release(never, speed=speed, load_s=NEVER_S, only=("verify-worker",)) as stuck,
    ):
        (lost,) = (stuck[name] for name in stuck.names)
        pods = [release[name] for name in release.names]
        patience_s = PATIENCE * LOAD_S / speed + LEAST_PATIENCE_S
        await until(lambda: all(pod.ready for pod in pods), "models are loaded", patience_s)
        await until(lambda: lost.restarts > 0, "a stuck container is ended", patience_s)
        for pod in pods:
            found.restarts += pod.restarts
            found.failed[pod.name] = pod.failed[STARTUP]
            if [event.what for event in pod.events] != ["begun", "started", "ready"]:
                found.early.append(pod.name)
        if (failure := lost.last(f"{STARTUP} failed")) is not None:
            found.never_s = (failure.at_s - lost.events[0].at_s) * speed
    return found


class Trial:
    """A release under load, and what is done to it."""

    def __init__(self, release: Release, speed: float, outcome: Outcome) -> None:
        self.release = release
        self._speed = speed
        self._outcome = outcome

    async def prefill(self) -> None:
        """A prompt whose chunks take nearly as long as an engine may be silent."""
        names = [*self.release.of("verify"), *self.release.of("draft")]
        pods = [self.release[name] for name in names]
        step_s = 0.6 * silence_s("verify-worker", self._speed)
        patience_s = pods[0].pod.probes[LIVENESS].silence_s / self._speed
        chunks = math.ceil(2.5 * patience_s / step_s)
        before = {pod.name: pod.failed[LIVENESS] + pod.failed[READINESS] for pod in pods}
        for name in names:
            self.release.tell(name, step_s)
        asked = GenerateOptions(
            token_ids=[n % 7 for n in range(chunks * CHUNK)], max_tokens=1, speculation=False
        )
        began_s = time.monotonic()
        async with self.release.client() as client:
            await client.generate(**asked).complete()
        self._outcome.prefill_s = (time.monotonic() - began_s) * self._speed
        self._outcome.patience_s = patience_s * self._speed
        for pod in pods:
            failed = pod.failed[LIVENESS] + pod.failed[READINESS] - before[pod.name]
            self._outcome.failed_in_prefill[pod.name] = failed
            self.release.tell(pod.name, PACE_S * pod.name.startswith("verify"))

    async def hang(self) -> None:
        """The engine of one worker of each kind."""
        pods = [self.release["verify-0"], self.release["draft-0"]]
        since_s = time.monotonic()
        for pod in pods:
            self.release.tell(pod.name, HANG)
        self._outcome.hung += await self._ended(pods, since_s)

    async def stop(self) -> None:
        """A whole process of each service."""
        names = ("coordinator-1", "verify-1", "draft-1")
        pods = [self.release[name] for name in names]
        since_s = time.monotonic()
        for pod in pods:
            os.kill(pod.child.pid, signal.SIGSTOP)
        self._outcome.stopped += await self._ended(pods, since_s)

    async def _ended(self, pods: Sequence[Kubelet], since_s: float) -> list[Ended]:
        """Wait until liveness has failed and the pods are ready again."""
        found = []
        for pod in pods:
            silent_s = silence_s(pod.pod.service, self._speed) * self._speed
            allowed_s = silent_s + pod.pod.probes[LIVENESS].silence_s
            patience_s = PATIENCE * allowed_s / self._speed + LEAST_PATIENCE_S
            failure = await _failure(pod, since_s, patience_s)
            seconds = (failure.at_s - since_s) * self._speed
            unready = _was_unready(pod, failure)
            found.append(Ended(pod.name, failure.why, seconds, allowed_s, unready))
        await self.release.all_ready()
        return found

    async def drain(self) -> None:
        """One pod of each service."""
        names = ("coordinator-0", "verify-0", "draft-0")
        self._outcome.drained += await asyncio.gather(*map(self._delete, names))
        restarts = {name: self.release[name].restarts for name in self.release.names}
        self._outcome.restarts = restarts

    async def _delete(self, name: str) -> Drain:
        target = self.release[name].target
        async with grpc.aio.insecure_channel(target) as channel:
            readiness, liveness = _Watch(channel, ""), _Watch(channel, ALIVE)
            await until(lambda: bool(readiness.said and liveness.said), name, LEAST_PATIENCE_S)
            code = await self.release.delete(name)
            return Drain(name, await readiness.all(), await liveness.all(), code)


class _Watch:
    """What the health service says of a service from now on, until the server has ended."""

    def __init__(self, channel: grpc.aio.Channel, service: str) -> None:
        self.said: list[str] = []
        self._task = asyncio.create_task(self._read(channel, service))

    async def _read(self, channel: grpc.aio.Channel, service: str) -> None:
        request = health_pb2.HealthCheckRequest(service=service)
        with suppress(grpc.aio.AioRpcError):  # the end of the server
            async for reply in health_pb2_grpc.HealthStub(channel).Watch(request):
                name = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
                self.said.append(name)

    async def all(self) -> list[str]:
        await self._task
        return self.said


async def _failure(pod: Kubelet, since_s: float, patience_s: float) -> Event:
    """The failure of the liveness probe after `since_s`, which may still have to come."""

    def found() -> list[Event]:
        failures = (event for event in pod.events if event.what == f"{LIVENESS} failed")
        return [event for event in failures if event.at_s > since_s]

    await until(lambda: bool(found()), f"liveness of {pod.name} fails", patience_s)
    return found()[0]


def _was_unready(pod: Kubelet, when: Event) -> bool:
    turns = (event for event in pod.events if event.what in ("ready", "unready"))
    return [event.what for event in turns if event.at_s <= when.at_s][-1] == "unready"


@asynccontextmanager
async def trial(model: Path, speed: float, outcome: Outcome) -> AsyncIterator[Trial]:
    """Two pods of each service, all ready."""
    silences = {
        part: {"flags": {"engine-silence-s": silence_s(service, speed)}, "replicas": 2}
        for part, service in (("verify", "verify-worker"), ("draft", "draft-worker"))
    }
    values = values_for(model, {"coordinator": {"replicas": 2}, **silences})
    async with Release(values, speed=speed, pace_s=PACE_S, report=progress) as release:
        await release.all_ready()
        yield Trial(release, speed, outcome)


@asynccontextmanager
async def under_load(at: Trial, outcome: Outcome) -> AsyncIterator[None]:
    """Completions without pause, which are all over in the end."""
    release, over = at.release, asyncio.Event()

    def until_over() -> Iterator[int]:
        for number in count():
            if over.is_set():
                return
            yield number

    async with release.client() as one, release.client(1) as other:
        clients = [one, other]
        alone = outcome.expected.run(clients, range(DIFFERENT), at_once=6, speculation=False)
        await alone
        running = asyncio.create_task(outcome.load.run(clients, until_over(), at_once=AT_ONCE))
        try:
            yield
        finally:
            over.set()
            await running
