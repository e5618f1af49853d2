"""Stands for one process of a local stack: `python -m tests.support.fake_service KIND DIR …`.

A worker marks itself as up with a file in DIR; the coordinator lists those files as its
workers. Each appends its name to DIR/stopped when SIGTERM ends it.
"""

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

from outrider.pb.v1 import coordinator_pb2 as pb
from tests.support.fake_coordinator import SCRIPT, serving


async def until_sigterm(directory: Path, name: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    (directory / f"{name}.pid").write_text("")
    await stop.wait()
    with (directory / "stopped").open("a") as log:
        log.write(f"{name}\n")


async def coordinator(directory: Path, port: int) -> None:
    async with serving(SCRIPT, port) as fake:
        names = [pb.WORKER_POOL_VERIFY, pb.WORKER_POOL_DRAFT]

        async def status(request: Any, context: Any) -> pb.GetStatusResponse:
            workers = [
                pb.WorkerInfo(
                    pool=names[path.stem.startswith("draft")],
                    worker_id=path.stem,
                    address="127.0.0.1:1",
                    model="fake",
                    capacity=4,
                    connected=True,
                )
                for path in directory.glob("*-*.pid")
            ]
            return pb.GetStatusResponse(workers=workers, redis_reachable=True)

        fake.get_status = status
        await until_sigterm(directory, "coordinator")


async def worker(directory: Path, name: str) -> None:
    await until_sigterm(directory, name)


async def stubborn(directory: Path, name: str) -> None:
    """Ignores SIGTERM."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: None)
    (directory / f"{name}.pid").write_text("")
    await asyncio.Event().wait()


async def broken(directory: Path, name: str) -> None:
    """Ends while it starts."""
    sys.stderr.write(f"{name}: the model has no weights\n")
    sys.exit(3)


if __name__ == "__main__":
    kind, where, argument = sys.argv[1:]
    if kind == "coordinator":
        asyncio.run(coordinator(Path(where), int(argument)))
    else:
        asyncio.run(
            {"worker": worker, "stubborn": stubborn, "broken": broken}[kind](Path(where), argument)
        )
