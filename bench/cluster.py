"""A system with several of everything that can be broken in every place, and mended.

Every process keeps its name and its port when it is started again. Each connection between
two of them goes through a proxy of its own; a worker listens on 127.0.0.1 and its proxy, which
is what the registry names, on the same port of 127.0.0.2 (Linux answers on both).

    link                     from, to
    coordinator-1            clients, a coordinator
    verify-1                 coordinators, a verify worker
    draft-1                  verify workers, a draft worker
    coordinator-1>valkey     a process, Valkey
"""

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from bench.proxy import Proxy
from outrider.client import AsyncClient, Status
from outrider.errors import DeadlineError, UnavailableError
from outrider.local.commands import Commands, StackSettings
from outrider.local.ports import listens, take_port
from outrider.local.process import ChildProcess

VALKEY = "valkey"
NEAR, FAR = "127.0.0.1", "127.0.0.2"
POLL_S = 0.1
STOP_GRACE_S = 20.0
START_VALKEY_S = 20.0
# Written at once, so that what was acknowledged is there after a kill.
PERSISTENT = ("--appendonly", "yes", "--appendfsync", "always")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How many there are of each."""

    coordinators: int = 2
    verify_workers: int = 2
    draft_workers: int = 2


class Cluster:
    """Starts, breaks, mends and ends the processes.

    settings: what each process is told; the numbers of workers in it are ignored, `size` counts.
    stand_ins: by name, the module and its first arguments that run in place of the service, and
        are given the service's flags.
    beside_redis: those that reach Valkey without a proxy, whose work would count as theirs.
    """

    def __init__(
        self,
        settings: StackSettings,
        *,
        size: Size | None = None,
        stand_ins: Mapping[str, Sequence[str]] = MappingProxyType({}),
        beside_redis: Collection[str] = (),
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        size = size or Size()
        self.coordinators = [f"coordinator-{n + 1}" for n in range(size.coordinators)]
        self.verify_workers = [f"verify-{n + 1}" for n in range(size.verify_workers)]
        self.draft_workers = [f"draft-{n + 1}" for n in range(size.draft_workers)]
        self._settings = settings
        self._stand_ins = stand_ins
        self._beside_redis = beside_redis
        self._report = report
        self._commands = Commands(settings)
        self._children: dict[str, ChildProcess] = {}
        self._links: dict[str, Proxy] = {}
        self._ports: dict[str, int] = {}
        self._run_dir = Path()
        # Of workers: the incarnation that was seen last, and those that were ended.
        self._incarnations: dict[str, str] = {}
        self._killed: set[str] = set()

    @property
    def addresses(self) -> list[str]:
        """host:port of each coordinator, as clients see it."""
        return [f"{NEAR}:{self._links[name].port}" for name in self.coordinators]

    @property
    def redis_url(self) -> str:
        """Valkey itself, past the proxies."""
        return f"redis://{NEAR}:{self._ports[VALKEY]}/0"

    @property
    def run_dir(self) -> Path:
        """Where the logs are."""
        return self._run_dir

    @property
    def links(self) -> Mapping[str, Proxy]:
        """The proxies by name."""
        return MappingProxyType(self._links)

    @property
    def services(self) -> list[str]:
        """Every process but Valkey."""
        return [*self.coordinators, *self.verify_workers, *self.draft_workers]

    @property
    def link_names(self) -> list[str]:
        """Of all links, also before the start."""
        return [*self.services, *(f"{name}>{VALKEY}" for name in self.services)]

    def process(self, name: str) -> ChildProcess:
        """The process that has the name now."""
        return self._children[name]

    async def start(self) -> None:
        """Start everything and wait until every coordinator sees every worker.

        Raises:
            UnavailableError: it was not ready in time; nothing is left running.
        """
        self._run_dir = Path(tempfile.mkdtemp(prefix="outrider-cluster-"))
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                self._ports[VALKEY] = take_port(NEAR, 0)
                await self.start_process(VALKEY)
                for name in self.services:
                    await self._wire(name)
                    await self.start_process(name)
                await self.ready()
        except BaseException as error:
            await self.stop(keep_logs=True)
            if isinstance(error, TimeoutError):
                raise UnavailableError(f"not ready; logs in {self._run_dir}") from None
            raise

    async def start_process(self, name: str) -> None:
        """Start a process, again if it ended; Valkey is waited for, the others not."""
        log_path = self._run_dir / f"{name}.log"
        self._children[name] = await ChildProcess.start(name, self._command(name), log_path)
        if name == VALKEY:
            async with asyncio.timeout(START_VALKEY_S):
                while not await listens(NEAR, self._ports[VALKEY]):
                    self._check_alive(VALKEY)
                    await asyncio.sleep(POLL_S)

    async def kill(self, name: str) -> None:
        """End a process with SIGKILL."""
        self._killed.add(self._incarnations.get(name, ""))
        await self._children[name].kill()

    def pause(self, name: str) -> None:
        """SIGSTOP."""
        self._send(name, signal.SIGSTOP)

    def go_on(self, name: str) -> None:
        """SIGCONT."""
        self._send(name, signal.SIGCONT)

    async def drain(self, name: str) -> int:
        """SIGTERM; the exit code once the process has left in order."""
        self._killed.add(self._incarnations.get(name, ""))
        self._send(name, signal.SIGTERM)
        return await self._children[name].wait()

    async def empty_valkey(self) -> None:
        """Kill Valkey and start it without its data."""
        await self.kill(VALKEY)
        shutil.rmtree(self._data_dir)
        await self.start_process(VALKEY)

    def save_valkey(self, where: str) -> None:
        """Copy the data of the running Valkey, as a replica that is about to lag would have it."""
        target = self._run_dir / where
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self._data_dir, target)

    async def restore_valkey(self, where: str) -> None:
        """Kill Valkey and start it with older data, as a failover to a lagging replica does."""
        await self.kill(VALKEY)
        shutil.rmtree(self._data_dir)
        shutil.move(self._run_dir / where, self._data_dir)
        await self.start_process(VALKEY)

    async def ready(self, names: Sequence[str] | None = None) -> None:
        """Wait until every coordinator answers and sees the workers, or those in `names`.

        Raises:
            UnavailableError: a process ended meanwhile.
        """
        told = ""
        names = self.services if names is None else names
        while missing := await self._missing(names):
            for name in (*missing, VALKEY):
                self._check_alive(name)
            if (waiting := f"waiting for {', '.join(missing)}") != told:
                self._report(waiting)
                told = waiting
            await asyncio.sleep(POLL_S)

    async def stop(self, *, keep_logs: bool = False) -> None:
        """End everything."""
        try:
            for name in self._children:
                self.go_on(name)
            for names in (self.coordinators, self.services, [VALKEY]):
                children = [self._children[name] for name in names if name in self._children]
                await asyncio.gather(*(child.stop(STOP_GRACE_S) for child in children))
        finally:
            for child in self._children.values():
                if child.running:  # the stop was cancelled
                    await child.kill()
            for link in self._links.values():
                await link.stop()
        if not keep_logs:
            shutil.rmtree(self._run_dir, ignore_errors=True)

    @property
    def _data_dir(self) -> Path:
        return self._run_dir / "valkey"

    async def _wire(self, name: str) -> None:
        """The two ports of a service and its way to Valkey."""
        self._ports[name] = take_port(NEAR, 0)
        if name in self.coordinators:
            link = Proxy(NEAR, 0, self._ports[name])
        else:
            link = Proxy(FAR, self._ports[name], self._ports[name])
        to_valkey = Proxy(NEAR, 0, self._ports[VALKEY])
        self._links |= {name: link, f"{name}>{VALKEY}": to_valkey}
        await link.start()
        await to_valkey.start()

    def _command(self, name: str) -> list[str]:
        if name == VALKEY:
            self._data_dir.mkdir(exist_ok=True)
            base = self._commands.valkey(self._ports[VALKEY], self._data_dir)
            return [*base, *PERSISTENT]
        redis_url = f"redis://{NEAR}:{self._links[f'{name}>{VALKEY}'].port}/0"
        if name in self._beside_redis:
            redis_url = self.redis_url
        worker = ["--port", str(self._ports[name]), "--advertise-host", FAR]
        if name in self.coordinators:
            base = self._commands.coordinator(redis_url, self._ports[name])
            base += ["--worker-id", name]
        elif name in self.draft_workers:
            base = [*self._commands.draft_worker(redis_url, name), *worker]
        else:
            base = [*self._commands.verify_worker(redis_url, name), *worker]
        if name not in self._stand_ins:
            return base
        # PYTHON -m SERVICE FLAGS…
        return [*base[:2], *self._stand_ins[name], *base[3:]]

    async def _missing(self, names: Sequence[str]) -> list[str]:
        """Who is not ready, or not seen by a coordinator that should be."""
        missing = []
        workers = [name for name in names if name not in self.coordinators]
        for coordinator in self.coordinators:
            if coordinator not in names:
                continue
            seen: set[str] = set()
            port = self._ports[coordinator]
            # A refused connection would make the channel wait before it tries again.
            if await listens(NEAR, port):
                async with AsyncClient(f"{NEAR}:{port}") as client:
                    with suppress(UnavailableError, DeadlineError):
                        seen = self._up(await client.status())
            missing += [name for name in workers if name not in seen and name not in missing]
            if not seen and coordinator not in missing:
                missing.insert(0, coordinator)
        return missing

    def _up(self, status: Status) -> set[str]:
        """The workers that a coordinator sees and can use."""
        up = [
            worker
            for worker in status.workers
            if (worker.connected or worker.pool == "draft")
            # One that was killed stays in the registry for a while.
            and worker.incarnation not in self._killed
        ]
        self._incarnations.update((worker.worker_id, worker.incarnation) for worker in up)
        return {worker.worker_id for worker in up}

    def _check_alive(self, name: str) -> None:
        child = self._children[name]
        if not child.running:
            raise UnavailableError(f"{name} ended with {child.exit_code}: {child.log_tail()}")

    def _send(self, name: str, number: signal.Signals) -> None:
        child = self._children[name]
        if child.running:
            os.kill(child.pid, number)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop(keep_logs=isinstance(error, Exception))
