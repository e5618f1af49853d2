"""A local stack whose services are stand-ins."""

import sys
from pathlib import Path

from outrider.local.commands import Commands, StackSettings


class FakeCommands(Commands):
    """Stand-ins of the three services; `kinds` says how a worker of that name behaves."""

    def __init__(self, settings: StackSettings, directory: Path) -> None:
        super().__init__(settings)
        self.directory = directory
        self.kinds: dict[str, str] = {}

    def coordinator(self, redis_url: str, port: int) -> list[str]:
        return self._fake(self.kinds.get("coordinator", "coordinator"), str(port))

    def verify_worker(self, redis_url: str, worker_id: str) -> list[str]:
        return self._fake(self.kinds.get(worker_id, "worker"), worker_id)

    draft_worker = verify_worker

    def _fake(self, kind: str, argument: str) -> list[str]:
        module = "tests.support.fake_service"
        return [sys.executable, "-m", module, kind, str(self.directory), argument]
