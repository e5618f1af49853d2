"""A service whose engine is slow to load, slow to step, or hangs, as it is told.

`python -m bench.unwell SERVICE LOAD_S PACE_S DIRECTORY --worker-id=NAME FLAGS…` is
`python -m SERVICE FLAGS…`, but the model takes at least LOAD_S seconds to load, and a step, or a
proposal, at least PACE_S, or what `tell` has said since; that is forgotten when the process is
started again.
"""

import math
import os
import pkgutil
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

# What loads the model, and what does a piece of work, by service.
LOADS = {
    "coordinator": "coordinator.app.load_served_model",
    "verify_worker": "verify_worker.app.load_target",
    "draft_worker": "draft_worker.app.build",
}
WORKS = {
    "verify_worker": "verify_worker.runner.Runner.run",
    "draft_worker": "draft_worker.scheduler.Scheduler.answer",
}
HANG = math.inf
POLL_S = 0.01


def tell(directory: Path, name: str, pid: int, seconds: float) -> None:
    """Have every piece of work of that process take so long; `HANG` has none end."""
    order = directory / f"{name}.new"
    order.write_text(f"{pid} {seconds}")
    order.replace(directory / name)


def told(directory: Path, name: str, default_s: float) -> float:
    """How long a piece of work of this process has to take."""
    try:
        pid, seconds = (directory / name).read_text().split()
    except FileNotFoundError:
        return default_s
    return float(seconds) if int(pid) == os.getpid() else default_s


def slow_down(what: str, least_s: Callable[[], float]) -> None:
    """Have a function, by its dotted name, take at least that long, as asked while it lasts."""
    right = pkgutil.resolve_name(what)

    def slow(*args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        result = right(*args, **kwargs)
        while time.monotonic() < began + least_s():
            time.sleep(POLL_S)
        return result

    mock.patch(what, slow).start()


def main(service: str, load_s: float, pace_s: float, directory: Path, flags: Sequence[str]) -> None:
    """Become the service."""
    name = next(flag.partition("=")[2] for flag in flags if flag.startswith("--worker-id="))
    slow_down(LOADS[service], lambda: load_s)
    if service in WORKS:
        slow_down(WORKS[service], lambda: told(directory, name, pace_s))
    sys.argv = [service, *flags]
    runpy.run_module(service, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:])
