"""Rank 0 of a split target: it has the others started, meets them, and loads with them."""

from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Protocol

import torch

from outrider.errors import RankLostError
from outrider.model.parallel.group import Limits, RankGroup, open_store
from verify_worker.abandoning import begin
from verify_worker.config import Settings
from verify_worker.ranks import Led, RankJob, lead_job

# How often it is seen whether a rank has ended while others are waited for.
_LOOK_S = 0.05


class Ranks(Protocol):
    """Whatever runs the other ranks; `verify_worker.ray_group.RayRanks` with Ray."""

    @property
    def address(self) -> str:
        """Where the others reach this process."""
        ...

    @property
    def threads(self) -> int:
        """Threads of torch of each rank; 0 leaves it to torch."""
        ...

    def place(self) -> torch.device:
        """Make room for all ranks; the device of rank 0, which is this process."""
        ...

    def run(self, job: RankJob) -> None:
        """Start the others on a job (see `verify_worker.ranks.follow_job`)."""
        ...

    def ended(self) -> bool:
        """Whether one of the others has ended, or all were `clear`ed; does not wait for it."""
        ...

    def loss(self) -> str:
        """Why ranks have ended, in words."""
        ...

    def clear(self) -> None:
        """End the others, also those that stand still."""
        ...

    def close(self) -> None:
        """`clear`, for good."""
        ...


def lead(settings: Settings, ranks: Ranks, most_blocks: int) -> Led:
    """All ranks with their shards, ready for steps.

    Raises:
        ConfigError, UnsupportedModelError: there is no room for so many ranks, one could not load,
            or they do not fit together; with the figures.
        RankLostError: a rank ended or stood still, with the cause.
    """
    limits = limits_of(settings)
    device = ranks.place()
    address, size = ranks.address, settings.tensor_parallel_size
    store = open_store(address, settings.rank_port, size, leads=True, limits=limits)
    job = RankJob(
        model=_absolute(settings.model),
        size=size,
        dtype=settings.dtype,
        numerics=settings.numerics,
        forward=settings.forward,
        linears=settings.linears,
        attention=settings.attention,
        device=device.type,
        threads=ranks.threads,
        kv_memory=settings.kv_memory,
        address=address,
        port=store.port,
        limits=limits,
    )
    ranks.run(job)
    try:
        group = _joined(
            lambda: RankGroup.join(store, 0, size, address=address, device=device, limits=limits),
            ranks,
        )
        return lead_job(job, group, most_blocks)
    except RankLostError as error:
        raise RankLostError(f"{error.message} ({ranks.loss()})") from error


def _joined(join: Callable[[], RankGroup], ranks: Ranks) -> RankGroup:
    """The group, once all have met.

    Raises:
        RankLostError: not all came in time, or one has ended before that; who waits for it would
            not learn of it, and goes on to wait in a thread of its own.
    """
    joining = begin(join)
    while not joining.done():
        wait([joining], timeout=_LOOK_S)
        if not joining.done() and ranks.ended():
            raise RankLostError("a rank ended before all had met")
    return joining.result()


def _absolute(model: str) -> str:
    """Where a checkpoint is, for processes that are started in another directory."""
    return str(Path(model).absolute()) if Path(model).exists() else model


def limits_of(settings: Settings) -> Limits:
    """How long is waited for other ranks."""
    return Limits(start_s=settings.rank_start_s, step_s=settings.rank_timeout_s)
