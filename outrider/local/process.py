"""One child process: started apart from the terminal, logged to a file, ended for sure."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Sequence
from pathlib import Path

from outrider.config import child_environment
from outrider.local import launcher


class ChildProcess:
    """A running command; `name` is for people, `log_path` holds what it writes.

    Ctrl-C does not reach it (it has a session of its own) and it does not outlive this
    process. On Linux it also ends with the thread that started it.
    """

    def __init__(self, name: str, process: Process, log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self._process = process

    @classmethod
    async def start(cls, name: str, command: Sequence[str], log_path: Path) -> "ChildProcess":
        """Start `command` with the environment of this process, less Outrider's own settings."""
        prefix = [sys.executable, "-I", "-S", launcher.__file__, str(os.getpid())]
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            process = await asyncio.create_subprocess_exec(
                *prefix,
                *command,
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                env=child_environment(),
                start_new_session=True,
            )
        finally:
            os.close(log)
        return cls(name, process, log_path)

    @property
    def pid(self) -> int:
        """The process id of the command itself."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the number of the signal that ended it."""
        return self._process.returncode

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.returncode is None

    async def wait(self) -> int:
        """Wait until it has ended; the exit code."""
        return await self._process.wait()

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL if it has not ended after `grace_s` seconds."""
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._signal(signal.SIGKILL)
        await self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self.running:
            self._process.send_signal(number)

    def log_tail(self, lines: int = 15) -> str:
        """The last lines that it wrote."""
        text = self.log_path.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])
