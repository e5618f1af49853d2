"""The whole system on this machine, each part a process of its own.

    async with LocalStack(StackSettings(model=path)) as stack:
        async with AsyncClient(stack.address) as client:
            ...

Used by `outrider up`, the demo, the benchmarks and the fault tests.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from outrider import rpc
from outrider.callers import COORDINATOR_NAME
from outrider.client import AsyncClient
from outrider.errors import DeadlineError, NotFoundError, UnavailableError
from outrider.local.commands import Commands, StackSettings, part_tls
from outrider.local.ports import listens, take_port
from outrider.local.process import ChildProcess
from outrider.tokens import Role, append, new_token

COORDINATOR = "coordinator"
VALKEY = "valkey"
# How often readiness is looked at.
POLL_S = 0.1


class LocalStack:
    """Starts, watches and ends the processes; `report` is told what is waited for."""

    def __init__(
        self,
        settings: StackSettings,
        *,
        report: Callable[[str], None] = lambda _: None,
        commands: Commands | None = None,
    ) -> None:
        self.settings = settings
        self._report = report
        self._commands = commands or Commands(settings)
        self._children: dict[str, ChildProcess] = {}
        self._killed: set[str] = set()
        self._made: dict[str, int] = {"verify": 0, "draft": 0}
        self._run_dir: Path | None = None
        self._port = 0
        self._redis_url = settings.redis_url
        self._listens = False
        self._token = ""

    @property
    def address(self) -> str:
        """host:port of the coordinator."""
        return rpc.address_of(self.settings.host, self._port)

    def client(self) -> AsyncClient:
        """A client that the coordinator knows: with a certificate and a token, as needed."""
        directory = self.settings.tls_dir
        tls = None if directory is None else part_tls(directory, "client", name=COORDINATOR_NAME)
        return AsyncClient(self.address, token=self._token, tls=tls)

    @property
    def redis_url(self) -> str:
        """Where the records are."""
        return self._redis_url

    @property
    def run_dir(self) -> Path:
        """Where the logs are, one file a process."""
        if self._run_dir is None:
            raise UnavailableError("the stack has not been started")
        return self._run_dir

    @property
    def processes(self) -> Mapping[str, ChildProcess]:
        """The processes that were started, by name: valkey, coordinator, verify-1, draft-1, …"""
        return MappingProxyType(self._children)

    async def start(self) -> None:
        """Start everything and wait until it can serve.

        Raises:
            AddressInUseError: the coordinator's port is taken.
            UnavailableError: a process ended, or was not ready in time; nothing is left running.
        """
        self._port = take_port(self.settings.host, self.settings.port)
        self._run_dir = self._new_run_dir()
        try:
            async with asyncio.timeout(self.settings.start_timeout_s):
                await self._start_all()
        except TimeoutError:
            tails = "\n".join(f"{c.name}: {c.log_tail(3)}" for c in self._children.values())
            await self.stop(keep_logs=True)
            raise UnavailableError(
                f"not ready after {self.settings.start_timeout_s:.0f} s; logs in {self.run_dir}"
                f"\n{tails}"
            ) from None
        except BaseException as error:
            await self.stop(keep_logs=isinstance(error, Exception))
            raise

    async def _start_all(self) -> None:
        if not self._redis_url:
            await self._start_valkey()
        command = self._commands.coordinator(self._redis_url, self._port, *self._tokens())
        await self._spawn(COORDINATOR, command)
        for _ in range(self.settings.verify_workers):
            await self._spawn_worker("verify")
        if self.settings.drafter != "none":
            for _ in range(self.settings.draft_workers):
                await self._spawn_worker("draft")
        await self._until_ready()

    def _tokens(self) -> tuple[str, ...]:
        """The files of tokens: that of the settings, and one with a token of the stack's own."""
        if not self.settings.tokens:
            return ()
        own = str(self.run_dir / "own.tokens")
        self._token, holder = new_token("outrider-up", Role.ADMIN)
        append(own, holder)
        return self.settings.tokens, own

    async def _start_valkey(self) -> None:
        port = take_port("127.0.0.1", 0)
        self._redis_url = f"redis://127.0.0.1:{port}/0"
        await self._spawn(VALKEY, self._commands.valkey(port, self.run_dir))
        self._report("waiting for valkey")
        while not await listens("127.0.0.1", port):
            self._check_alive(VALKEY)
            await asyncio.sleep(POLL_S)

    async def _spawn_worker(self, pool: str) -> str:
        self._made[pool] += 1
        name = f"{pool}-{self._made[pool]}"
        make = self._commands.verify_worker if pool == "verify" else self._commands.draft_worker
        await self._spawn(name, make(self._redis_url, name))
        return name

    async def _spawn(self, name: str, command: list[str]) -> None:
        log_path = self.run_dir / f"{name}.log"
        self._children[name] = await ChildProcess.start(name, command, log_path)

    async def _until_ready(self) -> None:
        """Wait until the coordinator answers and sees every worker that is meant to run."""
        told = ""
        async with self.client() as client:
            while missing := await self._missing(client):
                for name in missing:
                    self._check_alive(name)
                if VALKEY in self._children:
                    self._check_alive(VALKEY)
                if (waiting := f"waiting for {', '.join(missing)}") != told:
                    self._report(waiting)
                    told = waiting
                await asyncio.sleep(POLL_S)

    async def _missing(self, client: AsyncClient) -> list[str]:
        """The processes that are not ready, in the order they were started."""
        wanted = [name for name in self._children if name not in self._killed | {VALKEY}]
        # A refused connection would make the channel wait before it tries again.
        self._listens = self._listens or await listens(self.settings.host, self._port)
        if not self._listens:
            return wanted
        try:
            status = await client.status()
        except (UnavailableError, DeadlineError):
            return wanted
        ready = {w.worker_id for w in status.workers if w.connected or w.pool == "draft"}
        return [name for name in wanted if name != COORDINATOR and name not in ready]

    def _check_alive(self, name: str) -> None:
        child = self._children[name]
        if not child.running:
            raise UnavailableError(
                f"{name} ended with exit code {child.exit_code} while it started; "
                f"the end of its log ({child.log_path}):\n{child.log_tail()}"
            )

    async def add_draft_worker(self) -> str:
        """Start one more draft worker; its name, once the coordinator knows it."""
        return await self._add("draft")

    async def add_verify_worker(self) -> str:
        """Start one more verify worker; its name, once the coordinator is connected to it."""
        return await self._add("verify")

    async def _add(self, pool: str) -> str:
        name = await self._spawn_worker(pool)
        try:
            async with asyncio.timeout(self.settings.start_timeout_s):
                await self._until_ready()
        except TimeoutError:
            raise UnavailableError(f"{name} was not ready in time; see its log") from None
        return name

    async def kill(self, name: str) -> None:
        """End a process with SIGKILL, as a crash would."""
        if name not in self._children:
            raise NotFoundError(f"no process {name}; there are {', '.join(self._children)}")
        self._killed.add(name)
        await self._children[name].kill()

    async def first_death(self) -> ChildProcess:
        """Wait until a process ends that nobody asked to end."""
        living = [c for name, c in self._children.items() if name not in self._killed]
        waits = {asyncio.create_task(child.wait()): child for child in living}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        child = waits[done.pop()]
        self._killed.add(child.name)
        return child

    async def stop(self, *, keep_logs: bool = False) -> None:
        """End everything; a temporary run directory goes too, unless its logs are wanted."""
        grace_s = self.settings.drain_s + self.settings.stop_grace_s
        try:
            # The coordinator first: it ends its sessions while the workers still answer.
            await self._stop([n for n in self._children if n == COORDINATOR], grace_s)
            # Then the workers, which withdraw from the registry while Valkey still answers.
            await self._stop([n for n in self._children if n != VALKEY], grace_s)
            await self._stop(list(self._children), grace_s)
        finally:
            for child in self._children.values():
                if child.running:  # the stop was cancelled
                    await child.kill()
        if self.settings.run_dir is None and self._run_dir is not None and not keep_logs:
            shutil.rmtree(self._run_dir, ignore_errors=True)

    async def _stop(self, names: list[str], grace_s: float) -> None:
        self._killed.update(names)
        await asyncio.gather(*(self._children[name].stop(grace_s) for name in names))

    def _new_run_dir(self) -> Path:
        if self.settings.run_dir is None:
            return Path(tempfile.mkdtemp(prefix="outrider-"))
        self.settings.run_dir.mkdir(parents=True, exist_ok=True)
        return self.settings.run_dir

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
