"""The other ranks of a split target as processes of this machine, without Ray."""

import multiprocessing
from multiprocessing.process import BaseProcess
from unittest import mock

import torch

from bench.rank_spent import Arrivals
from outrider.model.parallel.group import RankGroup
from verify_worker.ranks import RankJob, follow_job


class LocalRanks:
    """See `verify_worker.leading.Ranks`; the others note their `arrivals` at collectives."""

    def __init__(self, threads: int = 1, arrivals: Arrivals | None = None) -> None:
        self.address = "127.0.0.1"
        self.threads = threads
        self._arrivals = arrivals
        self._others: list[BaseProcess] = []

    def place(self) -> torch.device:
        """Rank 0 is this process."""
        return torch.device("cpu")

    def run(self, job: RankJob) -> None:
        """Start the others."""
        spawn = multiprocessing.get_context("spawn")
        self._others = [
            spawn.Process(target=_follow, args=(job, rank, self._arrivals), daemon=True)
            for rank in range(1, job.size)
        ]
        for process in self._others:
            process.start()

    def ended(self) -> bool:
        """Whether one has ended."""
        return not all(process.is_alive() for process in self._others)

    def loss(self) -> str:
        """How each has ended."""
        for process in self._others:
            process.join(5)
        return f"exit codes {[process.exitcode for process in self._others]}"

    def clear(self) -> None:
        """End them."""
        for process in self._others:
            process.kill()
            process.join()
        self._others = []

    def close(self) -> None:
        """The same."""
        self.clear()


def _follow(job: RankJob, rank: int, arrivals: Arrivals | None) -> None:
    wait = arrivals.watched() if arrivals is not None else RankGroup._wait
    with mock.patch.object(RankGroup, "_wait", wait):
        follow_job(job, rank, job.address, torch.device("cpu"))
