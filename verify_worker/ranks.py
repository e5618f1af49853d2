"""One rank of a split target, from joining the others to the first step; rank 0 decides.

Every rank makes the same calls: it joins, loads its shard and reports what it has. Rank 0
compares the reports and answers with the number of KV blocks, or with the reason why it will not
be, so that a fault of any rank is told by rank 0.
"""

import json
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import torch

from outrider.errors import ConfigError, OutriderError
from outrider.model.describe import locate_checkpoint
from outrider.model.fast import FastNumerics
from outrider.model.numerics import packs
from outrider.model.paged import PagedModel, block_bytes
from outrider.model.parallel.follower import follow
from outrider.model.parallel.group import REPORT_BYTES, Limits, RankGroup, open_store
from outrider.model.parallel.leader import ParallelModel
from outrider.model.parallel.member import Member, gather_vocabulary
from outrider.model.parallel.outline import outline_of
from outrider.model.parallel.shards import Shard, load_shard
from outrider.model.selfcheck import OwnLogits, check_paged_forward
from outrider.sampling import gumbel_max
from verify_worker.config import AUTO
from verify_worker.kv_memory import budget_bytes, pool_blocks

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What a rank has once it has loaded; `error` says why it has not.

    `block_bytes` is what a block of KV takes on this rank, `budget_bytes` what it has for all.
    """

    rank: int
    host: str
    fingerprint: str = ""
    weights_bytes: int = 0
    peak_bytes: int = 0
    block_bytes: int = 0
    budget_bytes: int = 0
    error: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


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
        OutriderError, OSError, RuntimeError: it could not load, as it has reported.
    """
    store = open_store(job.address, job.port, job.size, leads=False, limits=job.limits)
    group = RankGroup.join(
        store, rank, job.size, address=own_address, device=device, limits=job.limits
    )
    try:
        shard, report, error = _load(job, group)
        group.collect(_encode(report))
        answer = json.loads(group.receive(starting=True))
        if error is not None:
            raise error
        if "refused" in answer:
            raise ConfigError(answer["refused"])
        assert shard is not None, "it reported no error"
        member, _ = _ready(job, shard, group, answer["blocks"])
        return follow(member)
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
        shard, report, error = _load(job, group)
        raw = group.collect(_encode(report))
        assert raw is not None, "rank 0 gets the reports"
        reports = tuple(RankReport(**json.loads(each)) for each in raw)
        try:
            if error is not None:
                raise error
            blocks = agree(reports, most_blocks, job.kv_memory)
        except Exception as fault:
            group.send(json.dumps({"refused": str(fault)}).encode())
            raise
        group.send(json.dumps({"blocks": blocks}).encode())
        assert shard is not None, "no error was reported"
        member, own = _ready(job, shard, group, blocks)
    except Exception as fault:
        group.fail(str(fault))
        raise
    return Led(member, shard, reports, blocks, own, job.packs)


def agree(reports: Sequence[RankReport], most_blocks: int, kv_memory: str) -> int:
    """How many blocks of KV all ranks have: what the one with the least room can hold.

    Raises:
        ConfigError: a rank has not loaded, has other weights, or has no room for a block.
    """
    for report in reports:
        if report.error:
            raise ConfigError(f"{report}: {report.error}")
    first = reports[0]
    for report in reports:
        if report.fingerprint != first.fingerprint:
            raise ConfigError(
                f"{report} has other weights (fingerprint {report.fingerprint}) than {first} "
                f"({first.fingerprint}): give all hosts the same checkpoint"
            )
    # What is free on a host is seen by each of its ranks.
    together = Counter(report.host for report in reports)
    shared = kv_memory == AUTO
    found = []
    for report in reports:
        budget = report.budget_bytes // (together[report.host] if shared else 1)
        found.append(pool_blocks(budget, report.block_bytes, most_blocks, kv_memory))
    return min(found)


def _load(job: RankJob, group: RankGroup) -> tuple[Shard | None, RankReport, Exception | None]:
    """The shard, or the error that the report tells of."""
    if job.threads:
        torch.set_num_threads(job.threads)
    host = socket.gethostname()
    try:
        shard = load_shard(job.model, group, dtype=job.dtype, packed=job.packs)
        outline = outline_of(shard.model, group.rank, group.size)
        report = RankReport(
            rank=group.rank,
            # Each device has memory of its own.
            host=f"{host}/{group.device}" if group.device.type == "cuda" else host,
            fingerprint=shard.model.fingerprint,
            weights_bytes=shard.kept_bytes,
            peak_bytes=shard.peak_bytes,
            # Found on an outline: a forward of the shard would need the other ranks.
            block_bytes=block_bytes(outline),
            budget_bytes=budget_bytes(job.kv_memory, group.device),
        )
    except (OutriderError, OSError, RuntimeError, MemoryError) as error:
        text = (
            error.message
            if isinstance(error, OutriderError)
            else f"{type(error).__name__}: {error}"
        )
        report = RankReport(rank=group.rank, host=host, error=text[: REPORT_BYTES // 4])
        return None, report, error
    return shard, report, None


def _ready(
    job: RankJob, shard: Shard, group: RankGroup, blocks: int
) -> tuple[Member, OwnLogits | None]:
    """The last things before steps, which all ranks do together."""
    each = -(-shard.model.vocab_size // group.size)

    def whole(logits: torch.Tensor) -> torch.Tensor:
        together = gather_vocabulary(logits, each, group)
        return logits if together is None else together[:, : shard.model.vocab_size]

    own = OwnLogits.of(shard.model, whole)
    if job.packs:
        # Exactly first; in fewer bits rounding would hide a fault.
        _check_unpacked(shard, group, own)
    member = Member.of(
        shard,
        group,
        blocks,
        numerics=job.numerics,
        forward=job.forward,
        linears=job.linears,
        attention=job.attention,
    )
    if group.device.type == "cpu":
        gumbel_max.prepare()
    group.meet(starting=True)
    return member, own


def _check_unpacked(shard: Shard, group: RankGroup, own: OwnLogits | None) -> None:
    """Compare the paged forward with the model's own, over weights that are unpacked for it."""
    member = Member(shard, group, PagedModel(shard.model, CHECK_BLOCKS, FastNumerics()))
    if group.rank:
        follow(member)
        return
    model = shard.model
    paged = ParallelModel(member, vocab_size=model.vocab_size, context_len=model.context_len)
    check_paged_forward(own, paged)
    paged.stop()


def _encode(report: RankReport) -> bytes:
    return json.dumps(asdict(report)).encode()
