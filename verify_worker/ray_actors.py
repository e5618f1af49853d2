"""What runs in the actors of `verify_worker.ray_group`.

Models are imported only where one runs: an actor that holds a place starts without them.
"""

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ray

from outrider import logs

if TYPE_CHECKING:
    from verify_worker.ranks import RankJob


@dataclass(frozen=True, slots=True)
class Seat:
    """Where an actor runs; `gpu` identifies the device that it was given, "" being none."""

    host: str
    node_id: str
    pid: int
    gpu: str


class HoldingActor:
    """Holds the place of rank 0, which is the worker's own process."""

    def seat(self, *, cuda: bool) -> Seat:
        """Where this is."""
        return _seat(cuda=cuda)


class RankActor:
    """One of the other ranks."""

    def seat(self, *, cuda: bool) -> Seat:
        """Where this is; answers once everything that a rank needs is imported."""
        import verify_worker.ranks  # noqa: F401 - it takes seconds, and is not counted as a step

        return _seat(cuda=cuda)

    def run(self, job: "RankJob", rank: int) -> int:
        """Be this rank until rank 0 says stop."""
        import torch

        from verify_worker.ranks import follow_job

        logs.configure("info", service="verify-rank", instance=str(rank))
        # Ray lets its workers yield to everything else; the other ranks wait for this one.
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        # Ray shows a rank no device but its own.
        device = torch.device("cuda", 0) if job.device == "cuda" else torch.device("cpu")
        return follow_job(job, rank, ray.util.get_node_ip_address(), device)


def _seat(*, cuda: bool) -> Seat:
    gpu = ""
    if cuda:
        import torch

        gpu = str(torch.cuda.get_device_properties(0).uuid)
    return Seat(socket.gethostname(), ray.get_runtime_context().get_node_id(), os.getpid(), gpu)
