"""Draft workers that a controller starts and stops, as a Deployment's are."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from outrider.local.process import ChildProcess

STOP_GRACE_S = 60.0


class DraftPool:
    """Real processes; `command(name)` starts one. The newest ends first, by SIGTERM."""

    def __init__(self, command: Callable[[str], Sequence[str]], run_dir: Path) -> None:
        self._command = command
        self._run_dir = run_dir
        self._started = 0
        self._wanted: list[ChildProcess] = []
        self._leaving: list[asyncio.Task[None]] = []
        # Names and exit codes of those that ended by themselves, or not in order.
        self.failed: list[str] = []

    @property
    def size(self) -> int:
        """How many there should be."""
        return len(self._wanted)

    async def resize(self, replicas: int) -> None:
        """Start or stop some; returns before they are ready or gone."""
        for child in [child for child in self._wanted if not child.running]:
            self.failed.append(f"{child.name} ended with {child.exit_code}: {child.log_tail(3)}")
            self._wanted.remove(child)
        while self.size < replicas:
            self._started += 1
            name = f"draft-{self._started}"
            log = self._run_dir / f"{name}.log"
            self._wanted.append(await ChildProcess.start(name, self._command(name), log))
        while self.size > replicas:
            child = self._wanted.pop()
            self._leaving.append(asyncio.create_task(self._end(child)))

    async def close(self) -> None:
        """End all of them."""
        await self.resize(0)
        await asyncio.gather(*self._leaving)

    async def _end(self, child: ChildProcess) -> None:
        await child.stop(STOP_GRACE_S)
        if child.exit_code != 0:
            self.failed.append(f"{child.name} left with {child.exit_code}: {child.log_tail(3)}")
