"""Load the target model and size its KV pool; refuses what can't be served exactly."""

from dataclasses import dataclass

import torch

from outrider import logs
from outrider.draft_length import parse_draft_length
from outrider.memory import format_bytes
from outrider.model.blocks import BLOCK_TOKENS
from outrider.model.linears.kinds import DENSE
from outrider.model.loading import load_model
from outrider.model.numerics import FAST, choose_numerics, packs
from outrider.model.paged import PagedModel, block_bytes
from outrider.model.prefix import kv_fingerprint
from outrider.model.selfcheck import OwnLogits, check_paged_forward
from outrider.model.tokenizers import load_tokenizer
from outrider.sampling import gumbel_max
from verify_worker.calibration import calibrate, step_times_ms
from verify_worker.config import Settings
from verify_worker.cost import CostModel
from verify_worker.kv_memory import budget_bytes, pool_blocks, statement
from verify_worker.runner import Runner
from verify_worker.scheduler import Limits, Scheduler

# Enough for the check of the forward pass.
CHECK_BLOCKS = 128
# How far rounding of packed weights may take the logits from the unpacked ones (relative, L2).
PACKED_LIMIT = 0.1


@dataclass(frozen=True, slots=True)
class Target:
    """The loaded target with its scheduler and runner, and what the registry says of it."""

    scheduler: Scheduler
    runner: Runner
    model: PagedModel
    token_count: int
    dtype: str
    numerics: str
    name: str
    fingerprint: str
    tokenizer_fingerprint: str
    context_len: int


def load_target(settings: Settings) -> Target:
    """Load, check and size; takes seconds to minutes and uses the calling thread.

    Raises:
        ConfigError: the checkpoint or a setting is wrong.
        UnsupportedModelError: the model can't be served exactly.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    tokenizer = load_tokenizer(settings.model)
    model = load_model(settings.model, dtype=settings.dtype, device=settings.device)
    # Rows of the embedding beyond the tokenizer's ids are padding and never come out.
    token_count = min(tokenizer.vocab_size, model.vocab_size)
    bytes_per_block = block_bytes(model)
    weights = sum(p.numel() * p.element_size() for p in model.module.parameters())
    own = OwnLogits.of(model)
    packed = packs(model, settings.numerics, settings.forward, settings.linears)
    dtype = f"{settings.dtype}-packed" if packed else settings.dtype
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
    # One session can't use more than the context, max_sessions of them no more than this.
    most = settings.max_sessions * -(-model.context_len // BLOCK_TOKENS)
    blocks = pool_blocks(budget, bytes_per_block, most, settings.kv_memory)
    paged = PagedModel(model, blocks, numerics)
    found = check_paged_forward(own, paged, PACKED_LIMIT if packed else None)
    log = logs.get(__name__)
    log.info(
        "target loaded",
        model=model.name,
        numerics=numerics.arithmetic,
        weights=format_bytes(weights),
        packed=packed,
        **statement(blocks, bytes_per_block, BLOCK_TOKENS, model.context_len),
        context_len=model.context_len,
        vocabulary=token_count,
        selfcheck_ratio=round(found.ratio, 2) if found else None,
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
    kv = kv_fingerprint(model.fingerprint, dtype, numerics.arithmetic)
    runner = Runner(paged, token_count)
    if device.type == "cpu":
        gumbel_max.prepare()
    cost = CostModel()
    if settings.calibrate:
        calibrate(runner, paged.pool, cost, model.context_len)
        log.info("step times in ms", **step_times_ms(cost))
    cache_key = kv if settings.prefix_cache else ""
    return Target(
        scheduler=Scheduler(paged.pool, limits, cost, kv_fingerprint=cache_key),
        runner=runner,
        model=paged,
        token_count=token_count,
        dtype=dtype,
        numerics=numerics.arithmetic,
        name=model.name,
        fingerprint=model.fingerprint,
        tokenizer_fingerprint=tokenizer.fingerprint,
        context_len=model.context_len,
    )
