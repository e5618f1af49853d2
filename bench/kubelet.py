"""One container under its probes, by the algorithm of the kubelet (`pkg/kubelet/prober`).

A startup probe holds the others back until it has succeeded once. Each probe has a result that
changes after so many like outcomes in a row; a startup or liveness probe that has failed ends the
container, which is then started again. While a pod is deleted, only readiness is still probed.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.pods import LIVENESS, READINESS, STARTUP, Pod, Probe
from outrider.local.process import ChildProcess

# However fast the schedule is, the machine is not: no answer within less is not silence.
LEAST_TIMEOUT_S = 2.0
# What is left for the container once the hook before its stop has taken all of the grace.
LEAST_GRACE_S = 2.0
SERVING = "SERVING"


@dataclass(frozen=True, slots=True)
class Event:
    """What happened when, on the monotonic clock; `why` is what the last probe got for an answer.

    what: begun, started, ready, unready, startup failed, liveness failed, deleted, or ended.
    """

    at_s: float
    what: str
    why: str = ""


class Kubelet:
    """Runs a pod's container, `command` and the pod's arguments, and probes it at `address`.

    speed: how much faster than it should it probes, and how much sooner it runs out of patience
        with a container that has failed. What a deleted pod gets for its end stays as it is.
    """

    def __init__(
        self,
        pod: Pod,
        name: str,
        address: str,
        command: Sequence[str],
        log_path: Path,
        *,
        speed: float,
    ) -> None:
        self.pod = pod
        self.name = name
        self.address = address
        self.ready = self.started = False
        self.restarts = 0
        self.events: list[Event] = []
        # Failed attempts of each probe, whether or not they changed its result.
        self.failed: Counter[str] = Counter()
        self._command = [*command, *_at(pod.arguments(name, address), address)]
        self._log_path = log_path
        self._speed = speed
        self._child: ChildProcess | None = None
        self._deleted = asyncio.Event()

    @property
    def child(self) -> ChildProcess:
        """The process of the container that runs now, or ran last."""
        assert self._child is not None, "the pod has not been started"
        return self._child

    @property
    def target(self) -> str:
        """host:port of the service."""
        return f"{self.address}:{self.pod.probes[READINESS].port}"

    def last(self, what: str) -> Event | None:
        """The last such event."""
        return next((event for event in reversed(self.events) if event.what == what), None)

    async def run(self) -> None:
        """Keep the container running until the pod has been deleted, and has ended."""
        while not self._deleted.is_set():
            self._child = await ChildProcess.start(self.name, self._command, self._log_path)
            self._note("begun")
            await self._watch(self._child)
            self.restarts += not self._deleted.is_set()

    async def delete(self) -> int:
        """End the pod in order, as its removal does; the exit code of the container."""
        self._deleted.set()
        self._note("deleted")
        await self._stop(self.child, self.pod.grace_s, self.pod.pre_stop_s)
        code = await self.child.wait()
        self._note("ended", str(code))
        return code

    async def _watch(self, child: ChildProcess) -> None:
        """Probe the container until it has ended; end it once a probe has failed."""
        self.started = False
        failed: asyncio.Future[Probe] = asyncio.get_running_loop().create_future()
        probing = [
            asyncio.create_task(self._keep_probing(kind, probe, failed))
            for kind, probe in self.pod.probes.items()
        ]
        ended = asyncio.create_task(child.wait())
        try:
            first: set[asyncio.Future[Any]] = {ended, failed}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                grace_s = failed.result().grace_s
                grace_s = self.pod.grace_s if grace_s is None else grace_s
                await self._stop(child, grace_s / self._speed, self.pod.pre_stop_s / self._speed)
            await ended
        finally:
            for task in (*probing, ended):
                task.cancel()
            await asyncio.gather(*probing, ended, return_exceptions=True)
            if child.running:  # this was cancelled
                await child.kill()
        self._turn(ready=False, why="ended")

    async def _stop(self, child: ChildProcess, grace_s: float, pre_stop_s: float) -> None:
        await asyncio.sleep(min(pre_stop_s, grace_s))
        await child.stop(max(grace_s - pre_stop_s, LEAST_GRACE_S / self._speed))

    async def _keep_probing(self, kind: str, probe: Probe, failed: asyncio.Future[Probe]) -> None:
        # Of a container that has just begun.
        good: bool | None = {STARTUP: None, LIVENESS: True, READINESS: False}[kind]
        last, in_a_row = None, 0
        due_s = time.monotonic() + probe.delay_s / self._speed
        while not (self._deleted.is_set() and kind != READINESS):
            await asyncio.sleep(due_s - time.monotonic())
            # Ticks that a slow attempt has missed are not made up for.
            due_s = max(due_s + probe.period_s / self._speed, time.monotonic())
            if self.started is (kind == STARTUP):
                if kind == STARTUP:
                    return
                continue
            answer = await self._ask(probe)
            outcome = answer == SERVING
            self.failed[kind] += not outcome
            in_a_row = in_a_row + 1 if outcome is last else 1
            last = outcome
            if in_a_row < (probe.successes if outcome else probe.failures) or outcome is good:
                continue
            good = outcome
            if kind == READINESS:
                self._turn(ready=good, why=answer)
            elif not good and not self._deleted.is_set():
                self._note(f"{kind} failed", answer)
                if not failed.done():
                    failed.set_result(probe)
                return
            elif kind == STARTUP:
                self.started = True
                self._note("started")

    async def _ask(self, probe: Probe) -> str:
        """What one attempt got for an answer."""
        timeout_s = max(probe.timeout_s / self._speed, LEAST_TIMEOUT_S)
        if probe.command:
            return await _executed(probe.command, timeout_s)
        return await health(f"{self.address}:{probe.port}", probe.service, timeout_s)

    def _turn(self, *, ready: bool, why: str) -> None:
        if ready is not self.ready:
            self.ready = ready
            self._note("ready" if ready else "unready", why)

    def _note(self, what: str, why: str = "") -> None:
        self.events.append(Event(time.monotonic(), what, why))


def _at(arguments: Sequence[str], address: str) -> list[str]:
    """Arguments with which a service listens at its own address only, as in a pod of its own."""
    return [f"--host={address}" if one.startswith("--host=") else one for one in arguments]


async def health(target: str, service: str, timeout_s: float) -> str:
    """What the health service says on a connection of its own, or why nothing was said."""
    # Channels of a process share connections, and the wait before one is tried again.
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            said = await stub.Check(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(said.status))


async def _executed(command: Sequence[str], timeout_s: float) -> str:
    process = await asyncio.create_subprocess_exec(*command)
    try:
        async with asyncio.timeout(timeout_s):
            code = await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        return "DEADLINE_EXCEEDED"
    return SERVING if code == 0 else f"exit code {code}"


async def until(true: Callable[[], bool], what: str, patience_s: float) -> None:
    """Wait until something holds.

    Raises:
        TimeoutError: it took longer than `patience_s`.
    """
    deadline_s = time.monotonic() + patience_s
    while not true():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {patience_s:.0f} s: {what}")
        await asyncio.sleep(0.02)
