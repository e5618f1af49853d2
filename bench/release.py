"""A release of the chart on this machine: each pod a process under a kubelet of its own.

The command lines and the probes are those of the rendered objects. Instead of a network of its
own each pod has an address of its own in 127.0.0.0/8, where it listens on the chart's ports.
"""

import asyncio
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.kubelet import Kubelet
from bench.pods import Manifest, Pod, pods, render
from bench.unwell import tell
from outrider.client import AsyncClient, Retry
from outrider.errors import DeadlineError, UnavailableError
from outrider.local.commands import Commands, StackSettings
from outrider.local.ports import listens, take_port
from outrider.local.process import ChildProcess

POLL_S = 0.1
# A first call may come to a coordinator that is about to go.
RETRY = Retry(start_s=60.0, resume_s=120.0)


class Release:
    """Starts, ends and replaces pods; `stop` ends all of them.

    values: of the chart, with a path of this machine as target; its Redis is one made here.
    load_s: how long each model takes to load at least. pace_s: the same of a verify worker's step.
    only: the services that run; the others are left out. speed: see `Kubelet`.
    """

    def __init__(
        self,
        values: Manifest,
        *,
        speed: float,
        load_s: float = 0.0,
        pace_s: float = 0.0,
        only: Sequence[str] = ("coordinator", "verify-worker", "draft-worker"),
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._values = values
        self._speed = speed
        self._load_s = load_s
        self._pace_s = pace_s
        self._only = only
        self._report = report
        self._kubelets: dict[str, Kubelet] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._valkey: ChildProcess | None = None
        self._run_dir = Path()

    @property
    def names(self) -> list[str]:
        """The pods, as `coordinator-0`, `verify-0`, `draft-1`."""
        return list(self._kubelets)

    @property
    def addresses(self) -> list[str]:
        """host:port of each coordinator."""
        found = (self._kubelets[name] for name in self.of("coordinator"))
        return [kubelet.target for kubelet in found]

    def of(self, part: str) -> list[str]:
        """The pods of `coordinator`, `verify` or `draft`."""
        return [name for name in self._kubelets if name.startswith(part)]

    def __getitem__(self, name: str) -> Kubelet:
        return self._kubelets[name]

    def client(self, first: int = 0) -> AsyncClient:
        """A client that begins with this coordinator."""
        addresses = self.addresses
        return AsyncClient([*addresses[first:], *addresses[:first]], retry=RETRY)

    def tell(self, name: str, seconds: float) -> None:
        """Have every piece of work of that pod's process take so long (`bench.unwell`)."""
        tell(self._run_dir, name, self[name].child.pid, seconds)

    async def start(self) -> None:
        """Start Valkey and all pods; they are not ready yet."""
        self._run_dir = Path(tempfile.mkdtemp(prefix="outrider-release-"))
        port = take_port("127.0.0.1", 0)
        command = Commands(StackSettings(model="")).valkey(port, self._run_dir)
        self._valkey = await ChildProcess.start("valkey", command, self._run_dir / "valkey.log")
        while not await listens("127.0.0.1", port):
            if not self._valkey.running:
                raise UnavailableError(f"valkey: {self._valkey.log_tail()}")
            await asyncio.sleep(POLL_S)
        values = {**self._values, "redis": {"url": f"redis://127.0.0.1:{port}/0"}}
        chance = random.SystemRandom()
        network = f"127.{chance.randrange(1, 255)}.{chance.randrange(1, 255)}"
        for pod in pods(render(values)):
            for number in range(pod.replicas if pod.service in self._only else 0):
                name = f"{pod.service.partition('-')[0]}-{number}"
                self._start_pod(pod, name, f"{network}.{len(self._kubelets) + 2}")

    def _start_pod(self, pod: Pod, name: str, address: str) -> None:
        module = pod.service.replace("-", "_")
        unwell = [module, str(self._load_s), str(self._pace_s * (module == "verify_worker"))]
        command = [sys.executable, "-m", "bench.unwell", *unwell, str(self._run_dir)]
        log_path = self._run_dir / f"{name}.log"
        kubelet = Kubelet(pod, name, address, command, log_path, speed=self._speed)
        self._kubelets[name] = kubelet
        self._running[name] = asyncio.create_task(kubelet.run())

    async def delete(self, name: str) -> int:
        """Delete a pod and wait for its end; its exit code."""
        code = await self[name].delete()
        await self._running[name]
        return code

    async def all_ready(self, patience_s: float = 90.0) -> None:
        """Wait until all pods are ready and every coordinator sees all workers.

        Raises:
            UnavailableError: that took too long.
        """
        told = ""
        try:
            async with asyncio.timeout(patience_s):
                while missing := await self._missing():
                    if (waiting := f"waiting for {', '.join(missing)}") != told:
                        self._report(waiting)
                        told = waiting
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            tails = "\n".join(f"{k.name}: {k.child.log_tail(3)}" for k in self._kubelets.values())
            raise UnavailableError(f"{told}; logs in {self._run_dir}\n{tails}") from None

    async def _missing(self) -> list[str]:
        missing = [name for name, kubelet in self._kubelets.items() if not kubelet.ready]
        if missing:
            return missing
        workers = {*self.of("verify"), *self.of("draft")}
        for name in self.of("coordinator"):
            async with AsyncClient(self[name].target) as client:
                with suppress(UnavailableError, DeadlineError):
                    status = await client.status()
                    up = (w for w in status.workers if w.connected or w.pool == "draft")
                    if workers <= {w.worker_id for w in up if not w.draining}:
                        continue
            missing.append(name)
        return missing

    async def stop(self, *, keep_logs: bool = False) -> None:
        """End everything at once."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        if self._valkey is not None:
            await self._valkey.kill()
        if not keep_logs:
            shutil.rmtree(self._run_dir, ignore_errors=True)

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop(keep_logs=True)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop(keep_logs=isinstance(error, Exception))


def values_for(model: Path, numbers: Mapping[str, Any]) -> Manifest:
    """Values of a small release: `numbers` are put over those of each part."""
    small = {"threads": 1, "kv-memory": "256MiB", "numerics": "invariant", "step-tokens": 16}
    parts: dict[str, Any] = {
        "coordinator": {"replicas": 1, "preStopSeconds": 1},
        "verify": {"replicas": 1, "flags": small},
        "draft": {"replicas": 1},
    }
    for part, more in numbers.items():
        flags = {**parts[part].get("flags", {}), **more.get("flags", {})}
        parts[part] = {**parts[part], **more, "flags": flags}
    return {"models": {"main": {"target": str(model)}}, **parts}
