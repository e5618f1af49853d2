"""Load the target model and size its KV pool; refuses what can't be served exactly."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from outrider import logs
from outrider.draft_length import parse_draft_length
from outrider.memory import format_bytes
from outrider.model.blocks import BLOCK_TOKENS
from outrider.model.describe import describe
from outrider.model.linears.kinds import DENSE
from outrider.model.loading import LoadedModel, load_model
from outrider.model.numerics import FAST, choose_numerics, packs
from outrider.model.paged import PagedModel, block_bytes
from outrider.model.parallel.leader import ParallelModel
from outrider.model.prefix import kv_fingerprint
from outrider.model.selfcheck import Comparison, OwnLogits, check_paged_forward
from outrider.model.tokenizers import load_tokenizer
from outrider.sampling import gumbel_max
from verify_worker.calibration import calibrate, step_times_ms
from verify_worker.config import Settings
from verify_worker.cost import CostModel
from verify_worker.kv_memory import (
    budget_bytes,
    most_blocks,
    pool_blocks,
    sessions_held,
    statement,
)
from verify_worker.leading import Ranks, lead
from verify_worker.rank_reports import RankReport
from verify_worker.ranks import CHECK_BLOCKS
from verify_worker.runner import Runner
from verify_worker.scheduler import Limits, Scheduler

# How far rounding of packed weights may take the logits from the unpacked ones (relative, L2).
PACKED_LIMIT = 0.1


@dataclass(frozen=True, slots=True)
class Target:
    """The loaded target with its scheduler and runner, and what the registry says of it.

    `weight` is how many sessions it holds without giving up the KV of others. `reports` are those
    of the ranks of a split target.
    """

    scheduler: Scheduler
    runner: Runner
    model: PagedModel | ParallelModel
    token_count: int
    dtype: str
    numerics: str
    name: str
    fingerprint: str
    tokenizer_fingerprint: str
    context_len: int
    weight: int
    reports: tuple[RankReport, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A target that is ready for steps, on one rank or several.

    `weights_bytes` are those of all ranks, `block_bytes` of KV those of the one that has most.
    `checked` is what the comparison with the model's own forward found.
    """

    model: LoadedModel
    paged: PagedModel | ParallelModel
    numerics: str
    dtype: str
    reports: tuple[RankReport, ...] = ()
    weights_bytes: int
    block_bytes: int
    packed: bool
    checked: Comparison | None


def load_target(settings: Settings, ranks: Ranks | None = None) -> Target:
    """Load, check and size; takes seconds to minutes and uses the calling thread.

    `ranks` are the others of a target that is split.

    Raises:
        ConfigError: the checkpoint or a setting is wrong.
        UnsupportedModelError: the model can't be served exactly.
        RankLostError: a rank ended or stood still, with the cause.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    tokenizer = load_tokenizer(settings.model)
    loaded = _load_whole(settings) if ranks is None else _load_split(settings, ranks)
    model, paged = loaded.model, loaded.paged
    # Rows of the embedding beyond the tokenizer's ids are padding and never come out.
    token_count = min(tokenizer.vocab_size, model.vocab_size)
    log = logs.get(__name__)
    log.info(
        "target loaded",
        model=model.name,
        ranks=max(len(loaded.reports), 1),
        numerics=loaded.numerics,
        weights=format_bytes(loaded.weights_bytes),
        packed=loaded.packed,
        **statement(paged.pool.total, loaded.block_bytes, BLOCK_TOKENS, model.context_len),
        context_len=model.context_len,
        vocabulary=token_count,
        selfcheck_ratio=round(loaded.checked.ratio, 2) if loaded.checked else None,
    )
    limits = Limits(
        context_len=model.context_len,
        vocab_size=token_count,
        max_sessions=settings.max_sessions,
        step_tokens=settings.step_tokens,
        prefill_slowdown=settings.prefill_slowdown,
        draft_len=parse_draft_length(settings.k),
        max_draft_len=settings.max_draft_len,
        max_tree_nodes=settings.max_tree_nodes,
        draft_wait_s=settings.draft_wait_s,
        q_top=settings.q_top,
        corpus=model.fingerprint,
        layers=model.module.config.get_text_config().num_hidden_layers,
    )
    kv = kv_fingerprint(model.fingerprint, loaded.dtype, loaded.numerics)
    runner = Runner(paged, token_count)
    if settings.device == "cpu":
        gumbel_max.prepare()
    cost = CostModel()
    if settings.calibrate:
        with _starting(paged):
            calibrate(runner, paged.pool, cost, model.context_len)
        log.info("step times in ms", **step_times_ms(cost))
    cache_key = kv if settings.prefix_cache else ""
    return Target(
        scheduler=Scheduler(paged.pool, limits, cost, kv_fingerprint=cache_key),
        runner=runner,
        model=paged,
        token_count=token_count,
        dtype=loaded.dtype,
        numerics=loaded.numerics,
        name=model.name,
        fingerprint=model.fingerprint,
        tokenizer_fingerprint=tokenizer.fingerprint,
        context_len=model.context_len,
        weight=sessions_held(paged.pool.total, model.context_len, settings.max_sessions),
        reports=loaded.reports,
    )


def _load_whole(settings: Settings) -> Loaded:
    """The target on one rank, this process."""
    model = load_model(settings.model, dtype=settings.dtype, device=settings.device)
    bytes_per_block = block_bytes(model)
    weights = sum(p.numel() * p.element_size() for p in model.module.parameters())
    own = OwnLogits.of(model)
    packed = packs(
        model.gguf,
        settings.numerics,
        settings.forward,
        settings.linears,
        model.module.device.type,
    )
    if packed:
        # Exactly first; in fewer bits rounding would hide a fault.
        plain = choose_numerics(FAST, model, linears=DENSE.name, release=False)
        check_paged_forward(own, PagedModel(model, CHECK_BLOCKS, plain))
    numerics = choose_numerics(
        settings.numerics,
        model,
        linears=settings.linears,
        forward=settings.forward,
        attention=settings.attention,
    )
    device = next(model.module.parameters()).device
    budget = budget_bytes(settings.kv_memory, device)
    most = most_blocks(settings.max_sessions, model.context_len)
    blocks = pool_blocks(budget, bytes_per_block, most, settings.kv_memory)
    paged = PagedModel(model, blocks, numerics)
    return Loaded(
        model=model,
        paged=paged,
        numerics=numerics.arithmetic,
        dtype=_kept_in(settings.dtype, packed=packed),
        weights_bytes=weights,
        block_bytes=bytes_per_block,
        packed=packed,
        checked=check_paged_forward(own, paged, PACKED_LIMIT if packed else None),
    )


def _load_split(settings: Settings, ranks: Ranks) -> Loaded:
    """The target on several ranks, of which this process is rank 0."""
    context_len = describe(settings.model).context_len
    led = lead(settings, ranks, most_blocks(settings.max_sessions, context_len))
    model = led.shard.model
    paged = ParallelModel(led.member, vocab_size=model.vocab_size, context_len=model.context_len)
    with paged.starting():
        checked = check_paged_forward(led.own, paged, PACKED_LIMIT if led.packed else None)
    log = logs.get(__name__)
    for report in led.reports:
        log.info(
            "rank loaded",
            rank=report.rank,
            host=report.host,
            weights=format_bytes(report.weights_bytes),
            most_while_loading=format_bytes(report.peak_bytes),
            kv_memory=format_bytes(led.blocks * report.block_bytes),
        )
    return Loaded(
        model=model,
        paged=paged,
        numerics=led.member.paged.arithmetic,
        dtype=_kept_in(settings.dtype, packed=led.packed),
        reports=led.reports,
        weights_bytes=sum(report.weights_bytes for report in led.reports),
        block_bytes=max(report.block_bytes for report in led.reports),
        packed=led.packed,
        checked=checked,
    )


def _starting(paged: PagedModel | ParallelModel) -> AbstractContextManager[None]:
    """The first steps of ranks may take as long as their start."""
    return paged.starting() if isinstance(paged, ParallelModel) else nullcontext()


def _kept_in(dtype: str, *, packed: bool) -> str:
    """Weights, as coordinators compare workers by."""
    return f"{dtype}-packed" if packed else dtype
