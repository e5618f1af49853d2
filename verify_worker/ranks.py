"""One rank of a split target, from joining the others to the first step; rank 0 decides.

Every rank makes the same calls: it joins, loads its shard, lays its weights out, makes its pages,
and reports how far it has come after each. Rank 0 compares the reports and answers with the number
of KV blocks, or with the reason why it will not be, so that a fault of any rank is told by rank 0.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from outrider import logs
from outrider.errors import ConfigError, OutriderError
from outrider.model.describe import locate_checkpoint
from outrider.model.fast import FastNumerics
from outrider.model.numerics import packs
from outrider.model.paged import Numerics, PagedModel, block_bytes
from outrider.model.parallel.follower import follow
from outrider.model.parallel.group import Limits, RankGroup, open_store
from outrider.model.parallel.leader import ParallelModel
from outrider.model.parallel.member import Member, gather_vocabulary, split_numerics
from outrider.model.parallel.outline import outline_of
from outrider.model.parallel.shards import Shard, load_shard
from outrider.model.selfcheck import OwnLogits, check_paged_forward
from outrider.sampling import gumbel_max
from verify_worker.config import AUTO
from verify_worker.kv_memory import budget_bytes
from verify_worker.rank_reports import RankReport, agree, compare

T = TypeVar("T")
# Enough for the check of the forward pass.
CHECK_BLOCKS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """What every rank is told; `address` and `port` are where rank 0 waits for the others.

    `threads`: of torch, 0 leaves it to torch. `device` is "cpu" or "cuda".
    """

    model: str
    size: int
    dtype: str = "float32"
    numerics: str = "fast"
    forward: str = "auto"
    linears: str = "auto"
    attention: str = "sdpa"
    device: str = "cpu"
    threads: int = 1
    kv_memory: str = AUTO
    address: str = "127.0.0.1"
    port: int = 0
    limits: Limits = field(default_factory=Limits)

    @property
    def packs(self) -> bool:
        """Whether weights stay in the few bits of their file, if they come from one."""
        where = locate_checkpoint(self.model)
        gguf = where if where.suffix == ".gguf" else None
        return packs(gguf, self.numerics, self.forward, self.linears, self.device)


@dataclass(frozen=True, slots=True)
class Led:
    """Rank 0 with everything ready, and what all ranks reported; `own` is for the check.

    `packed`: weights are in few bits.
    """

    member: Member
    shard: Shard
    reports: tuple[RankReport, ...]
    blocks: int
    own: OwnLogits | None
    packed: bool


def follow_job(job: RankJob, rank: int, own_address: str, device: torch.device) -> int:
    """Be rank 1 to N - 1 until rank 0 says stop; returns how many steps were run.

    Raises:
        RankLostError: another rank is gone or stands still.
        ConfigError: rank 0 has refused to go on.
        Exception: it could not load, as it has reported.
    """
    store = open_store(job.address, job.port, job.size, leads=False, limits=job.limits)
    group = RankGroup.join(
        store, rank, job.size, address=own_address, device=device, limits=job.limits
    )
    try:
        return follow(_prepared(job, group, 0).member)
    except Exception as fault:
        group.fail(str(fault))
        raise


def lead_job(job: RankJob, group: RankGroup, most_blocks: int) -> Led:
    """Be rank 0 of a group that has met, until all are ready for steps.

    Raises:
        ConfigError, UnsupportedModelError: a rank could not load, or they do not fit together.
        RankLostError: a rank is gone or stands still.
    """
    try:
        return _prepared(job, group, most_blocks)
    except Exception as fault:
        group.fail(str(fault))
        raise


def _prepared(job: RankJob, group: RankGroup, most_blocks: int) -> Led:
    """What all ranks do together before the first step; rank 0 knows `most_blocks`."""
    if job.threads:
        torch.set_num_threads(job.threads)
    report = RankReport.here(group.rank, group.device)

    def loaded() -> tuple[Shard, RankReport]:
        return _load(job, group, report)

    def fits(reports: Sequence[RankReport]) -> int:
        compare(reports)
        return 0

    (shard, report), _, _ = _together(group, report, loaded, fits)
    own = _own_logits(job, shard, group)

    def laid_out() -> tuple[Numerics, RankReport]:
        numerics = split_numerics(
            shard,
            group.size,
            numerics=job.numerics,
            forward=job.forward,
            linears=job.linears,
            attention=job.attention,
        )
        # Now, and not before: laying out takes memory, and gives some back.
        return numerics, replace(report, budget_bytes=budget_bytes(job.kv_memory, group.device))

    def blocks_of(reports: Sequence[RankReport]) -> int:
        return agree(reports, most_blocks, job.kv_memory)

    (numerics, report), reports, blocks = _together(group, report, laid_out, blocks_of)

    def paged() -> tuple[Member, RankReport]:
        member = Member(shard, group, PagedModel(shard.model, blocks, numerics))
        if group.device.type == "cpu":
            gumbel_max.prepare()
        return member, report

    (member, _), _, _ = _together(group, report, paged, fits)
    return Led(member, shard, reports, blocks, own, job.packs)


def _together(
    group: RankGroup,
    report: RankReport,
    call: Callable[[], tuple[T, RankReport]],
    decide: Callable[[Sequence[RankReport]], int],
) -> tuple[tuple[T, RankReport], tuple[RankReport, ...], int]:
    """What `call` gives here, all reports (on rank 0), and what rank 0 decides on them.

    A fault of any rank is that of all; the call must need no other rank, so that it can be told.
    """
    made: tuple[T, RankReport] | None = None
    error: Exception | None = None
    try:
        made = call()
        report = made[1]
    except Exception as fault:
        error, report = fault, report.failed(fault)
        if not isinstance(fault, OutriderError):
            logs.get(__name__).exception("a rank could not start", rank=group.rank)
    raw = group.collect(report.encode())
    if raw is None:
        answer = json.loads(group.receive(starting=True))
        if error is not None:
            raise error
        if "refused" in answer:
            raise ConfigError(answer["refused"])
        assert made is not None, "no error was reported"
        return made, (), answer["decided"]
    try:
        if isinstance(error, OutriderError):
            raise error
        reports = tuple(RankReport.decode(each) for each in raw)
        decided = decide(reports)
    except Exception as fault:
        group.send(json.dumps({"refused": str(fault)}).encode())
        raise
    group.send(json.dumps({"decided": decided}).encode())
    assert made is not None, "no error was reported"
    return made, reports, decided


def _load(job: RankJob, group: RankGroup, report: RankReport) -> tuple[Shard, RankReport]:
    """The shard, and what is to be told of it."""
    shard = load_shard(job.model, group, dtype=job.dtype, packed=job.packs)
    outline = outline_of(shard.model, group.rank, group.size)
    return shard, replace(
        report,
        fingerprint=shard.model.fingerprint,
        weights_bytes=shard.kept_bytes,
        peak_bytes=shard.peak_bytes,
        # Found on an outline: a forward of the shard would need the other ranks.
        block_bytes=block_bytes(outline),
    )


def _own_logits(job: RankJob, shard: Shard, group: RankGroup) -> OwnLogits | None:
    """What the model's own code makes of the tokens of the check, before weights are laid out."""
    each = -(-shard.model.vocab_size // group.size)

    def whole(logits: torch.Tensor) -> torch.Tensor:
        together = gather_vocabulary(logits, each, group)
        return logits if together is None else together[:, : shard.model.vocab_size]

    with group.watched(starting=True):
        own = OwnLogits.of(shard.model, whole)
    if job.packs:
        # Exactly first; in fewer bits rounding would hide a fault.
        _check_unpacked(shard, group, own)
    return own


def _check_unpacked(shard: Shard, group: RankGroup, own: OwnLogits | None) -> None:
    """Compare the paged forward with the model's own, over weights that are unpacked for it."""
    member = Member(shard, group, PagedModel(shard.model, CHECK_BLOCKS, FastNumerics()))
    if group.rank:
        follow(member)
        return
    model = shard.model
    paged = ParallelModel(member, vocab_size=model.vocab_size, context_len=model.context_len)
    with paged.starting():
        check_paged_forward(own, paged)
    paged.stop()
