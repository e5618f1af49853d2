"""NCCL between the ranks: a group of it that fails by our time limits, and by no others."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from outrider.config import variables

# It has no type hints, and is only there where torch was built with it.
_DISTRIBUTED: Any = distributed
# torch reads these when a group is made. It has a watchdog, which by default ends the process when
# it sees an error or a wait over its limit: before `Watch` gives the connection up, and with it
# all that rank 0 could say and load anew. 0: it does nothing about either. (2 would have it give
# the connection up, and a step would come to its end with sums that mean nothing.) Its notes for
# debugging also end the process, some minutes later; and while it waits for them to be written,
# four times as long as is said here, no sum can begin.
_LEAVE_ERRORS_TO_US = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}


def connect(
    store: Any, rank: int, size: int, device: torch.device, start_s: float, most_s: float
) -> Any:
    """A group over NCCL that is connected, which takes at most `start_s`.

    Sums over it may take `most_s`. That is no limit of ours, and has to be above them all.

    Raises:
        OSError, RuntimeError: it can't connect, or not in time.
    """
    nccl = _DISTRIBUTED.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=most_s)
    with variables(_LEAVE_ERRORS_TO_US):
        group = nccl(store, rank, size, options)

    def meet() -> None:
        with torch.cuda.device(device):
            group.eager_connect_single_device(device)

    # Else it would be done by the first sum, within the call, where nothing looks after it.
    within(start_s, meet, "NCCL does not connect")
    return group


def within(limit_s: float, call: Callable[[], None], what: str) -> None:
    """Make a call that may never return; after `limit_s` it is left alone in its thread.

    Raises:
        TimeoutError: it has not returned; the message is `what`.
        Exception: what the call raises.
    """
    done = threading.Event()
    faults: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as fault:  # it is raised below, whatever it is
            faults.append(fault)
        done.set()

    # A daemon: the process can end without it.
    threading.Thread(target=run, name="connect", daemon=True).start()
    if not done.wait(limit_s):
        raise TimeoutError(what)
    if faults:
        raise faults[0]
