"""The ranks of a split model as real processes; rank 0 is the test."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from torch.distributed import FileStore

from outrider.model.loading import load_model
from outrider.model.numerics import choose_numerics
from outrider.model.paged import PagedModel
from outrider.model.parallel.follower import follow
from outrider.model.parallel.group import Limits, RankGroup
from outrider.model.parallel.leader import ParallelModel
from outrider.model.parallel.member import Member
from outrider.model.parallel.shards import load_shard
from tests.support.rank_processes import context
from verify_worker import ranks
from verify_worker.ranks import RankJob, follow_job

# Others use the machine too: no test waits this long unless something is broken.
_PATIENT = Limits(start_s=120.0, step_s=120.0)


@dataclass(slots=True)
class Ranks:
    """A running group, seen from rank 0."""

    model: ParallelModel
    group: RankGroup
    others: list[BaseProcess] = field(default_factory=list)

    def stop_for_now(self, rank: int) -> None:
        """Let a rank stand still."""
        os.kill(self._pid(rank), signal.SIGSTOP)

    def kill(self, rank: int) -> None:
        """End a rank, and wait until it is gone."""
        os.kill(self._pid(rank), signal.SIGKILL)
        self.others[rank - 1].join(60)

    def exits(self) -> list[int | None]:
        """How the other ranks end, which they have to do by themselves: None for one that stays."""
        for process in self.others:
            process.join(60)
        return [process.exitcode for process in self.others]

    def _pid(self, rank: int) -> int:
        pid = self.others[rank - 1].pid
        assert pid is not None
        return pid


@contextmanager
def running(
    path: Path,
    size: int,
    *,
    blocks: int = 64,
    limits: Limits = _PATIENT,
    device: str = "cpu",
    **options: Any,
) -> Iterator[Ranks]:
    """`size` ranks of the model at `path`; unless one was lost, all have to end well.

    With `device` "cuda" each has a GPU of its own.
    """
    with TemporaryDirectory() as where:
        store = f"{where}/store"
        others = [
            context().Process(
                target=_run_follower,
                args=(str(path), store, rank, size, blocks, limits, device, options),
            )
            for rank in range(1, size)
        ]
        for process in others:
            process.start()
        try:
            member, shard = _member(str(path), store, 0, size, blocks, limits, device, options)
            model = ParallelModel(
                member, vocab_size=shard.model.vocab_size, context_len=shard.model.context_len
            )
            yield Ranks(model, member.group, others)
            if not member.group.failed:
                model.stop()
                for process in others:
                    process.join(60)
                assert [process.exitcode for process in others] == [0] * (size - 1)
        finally:
            for process in others:
                process.kill()
                process.join()


class ForkedRanks:
    """The other ranks of a `verify_worker` as processes of this machine, without Ray.

    `swap` gives a rank another job than rank 0 has.
    """

    def __init__(self, swap: dict[int, Any] | None = None) -> None:
        self.others: list[BaseProcess] = []
        self.address, self.threads = "127.0.0.1", 1
        self._told: Any = context().SimpleQueue()
        self._swap = swap or {}

    def place(self) -> torch.device:
        """Rank 0 runs here."""
        return torch.device("cpu")

    def run(self, job: RankJob) -> None:
        """Start the others."""
        self.others = [
            context().Process(
                target=_follow_job,
                args=(replace(job, **self._swap.get(rank, {})), rank, self._told),
            )
            for rank in range(1, job.size)
        ]
        for process in self.others:
            process.start()

    def page_bytes(self) -> list[int]:
        """What each of the others has allocated for KV, in their order; waits for those to come."""
        return [size for _, size in sorted(self._told.get() for _ in self.others)]

    def ended(self) -> bool:
        """Whether one has ended."""
        return not all(process.is_alive() for process in self.others)

    def loss(self) -> str:
        """How each has ended."""
        for process in self.others:
            process.join(5)
        return f"exit codes {[process.exitcode for process in self.others]}"

    def clear(self) -> None:
        """End them."""
        for process in self.others:
            process.kill()
            process.join()

    def close(self) -> None:
        """The same."""
        self.clear()


def alone(path: Path, *, blocks: int = 64, **options: Any) -> PagedModel:
    """The same model on one rank."""
    model = load_model(str(path))
    options = {"forward": "lean"} | options
    return PagedModel(model, blocks, choose_numerics("fast", model, **options))


def _member(
    path: str,
    store: str,
    rank: int,
    size: int,
    blocks: int,
    limits: Limits,
    device: str,
    options: dict[str, Any],
) -> tuple[Member, Any]:
    place = torch.device(device, rank) if device == "cuda" else torch.device(device)
    group = RankGroup.join(FileStore(store, size), rank, size, device=place, limits=limits)
    shard = load_shard(path, group, packed=path.endswith(".gguf"))
    return Member.of(shard, group, blocks, **options), shard


def _run_follower(path: str, store: str, rank: int, size: int, *others: Any) -> None:
    torch.set_num_threads(1)
    member, _ = _member(path, store, rank, size, *others)
    follow(member)


def page_bytes(paged: PagedModel) -> int:
    """What its pages take, by the memory behind their tensors."""
    pages = paged.pages
    memory = [tensor.untyped_storage() for tensor in (*pages.rows, *pages.keys, *pages.values)]
    return sum({each.data_ptr(): each.nbytes() for each in memory}.values())


def _follow_job(job: RankJob, rank: int, told: Any) -> None:
    if job.model == "":
        os._exit(3)  # it does not even get to its error
    prepared = ranks._prepared

    def tell(*others: Any) -> Any:
        led = prepared(*others)
        told.put((rank, page_bytes(led.member.paged)))
        return led

    mock.patch.object(ranks, "_prepared", tell).start()
    follow_job(job, rank, "127.0.0.1", torch.device("cpu"))
