"""The other ranks of a split target as processes of this machine, without Ray."""

import multiprocessing
from multiprocessing.process import BaseProcess

import torch

from verify_worker.ranks import RankJob, follow_job


class LocalRanks:
    """See `verify_worker.leading.Ranks`."""

    def __init__(self, threads: int = 1) -> None:
        self.address = "127.0.0.1"
        self.threads = threads
        self._others: list[BaseProcess] = []

    def place(self) -> torch.device:
        """Rank 0 is this process."""
        return torch.device("cpu")

    def run(self, job: RankJob) -> None:
        """Start the others."""
        spawn = multiprocessing.get_context("spawn")
        self._others = [
            spawn.Process(target=_follow, args=(job, rank), daemon=True)
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


def _follow(job: RankJob, rank: int) -> None:
    follow_job(job, rank, job.address, torch.device("cpu"))
