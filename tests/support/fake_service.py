"""Stands for one process of a local stack: `python -m tests.support.fake_service KIND DIR …`.

A worker marks itself as up with a file in DIR; the coordinator lists those files as its
workers. Each appends its name to DIR/stopped when SIGTERM ends it.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from outrider.pb.v1 import coordinator_pb2 as pb
from tests.support.fake_coordinator import PLAIN, SCRIPT, delta, finished, serving, started


async def until_sigterm(directory: Path, name: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    (directory / f"{name}.pid").write_text("")
    await stop.wait()
    with (directory / "stopped").open("a") as log:
        log.write(f"{name}\n")


async def coordinator(directory: Path, port: int, *, inexact: bool = False) -> None:
    """Always says the same; an inexact one says something else without speculation."""
    async with serving(SCRIPT, port) as fake:
        if inexact:
            fake.plain_script = [started(), delta(0, (9, "Bye", PLAIN)), finished(1)]
        pools = [pb.WORKER_POOL_VERIFY, pb.WORKER_POOL_DRAFT]

        async def status(request: Any, context: Any) -> pb.GetStatusResponse:
            workers = [
                pb.WorkerInfo(
                    pool=pools[name.startswith("draft")],
                    worker_id=name,
                    address="127.0.0.1:1",
                    model="fake",
                    capacity=4,
                    connected=True,
                )
                for name in sorted(p.removesuffix(".pid") for p in os.listdir(directory))
                if "-" in name
            ]
            return pb.GetStatusResponse(workers=workers, redis_reachable=True)

        fake.get_status = status
        await until_sigterm(directory, "coordinator")


async def stubborn(directory: Path, name: str) -> None:
    """Ignores SIGTERM."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: None)
    (directory / f"{name}.pid").write_text("")
    await asyncio.Event().wait()


if __name__ == "__main__":
    kind, where, argument = sys.argv[1:]
    match kind:
        case "coordinator" | "inexact":
            asyncio.run(coordinator(Path(where), int(argument), inexact=kind == "inexact"))
        case "worker":
            asyncio.run(until_sigterm(Path(where), argument))
        case "stubborn":
            asyncio.run(stubborn(Path(where), argument))
        case "broken":
            sys.stderr.write(f"{argument}: the model has no weights\n")
            sys.exit(3)
