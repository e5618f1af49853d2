"""Load the target model and size its KV pool; refuses what can't be served exactly."""

from dataclasses import dataclass

import torch

from outrider import logs
from outrider.errors import ConfigError
from outrider.model.blocks import BLOCK_TOKENS
from outrider.model.loading import load_model
from outrider.model.numerics import choose_numerics
from outrider.model.paged import PagedModel, block_bytes
from outrider.model.selfcheck import check_paged_forward
from outrider.model.tokenizers import load_tokenizer
from verify_worker.config import Settings
from verify_worker.runner import Runner
from verify_worker.scheduler import Limits, Scheduler

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Target:
    """The loaded target with its scheduler and runner, and what the registry says of it."""

    scheduler: Scheduler
    runner: Runner
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
    wanted = settings.kv_memory_mb * _MIB // bytes_per_block
    # One session can't use more than the context, max_sessions of them no more than this.
    most = settings.max_sessions * -(-model.context_len // BLOCK_TOKENS)
    blocks = min(wanted, most)
    if blocks < 1:
        raise ConfigError(
            f"--kv-memory-mb {settings.kv_memory_mb} holds no block of {BLOCK_TOKENS} tokens "
            f"({bytes_per_block} bytes); give more"
        )
    numerics = choose_numerics(settings.numerics, model)
    paged = PagedModel(model, blocks, numerics)
    compared = check_paged_forward(model, paged)
    weights = sum(p.numel() * p.element_size() for p in model.module.parameters())
    logs.get(__name__).info(
        "target loaded",
        model=model.name,
        numerics=settings.numerics,
        weights_mb=weights // _MIB,
        kv_blocks=blocks,
        kv_tokens=blocks * BLOCK_TOKENS,
        kv_mb=blocks * bytes_per_block // _MIB,
        context_len=model.context_len,
        vocabulary=token_count,
        selfcheck_ratio=round(compared.ratio, 2) if compared else None,
    )
    limits = Limits(
        context_len=model.context_len,
        vocab_size=token_count,
        max_sessions=settings.max_sessions,
        step_tokens=settings.step_tokens,
        draft_len=settings.draft_len,
        max_draft_len=settings.max_draft_len,
        draft_wait_s=settings.draft_wait_s,
        q_top=settings.q_top,
    )
    return Target(
        scheduler=Scheduler(paged.pool, limits),
        runner=Runner(paged, token_count),
        name=model.name,
        fingerprint=model.fingerprint,
        tokenizer_fingerprint=tokenizer.fingerprint,
        context_len=model.context_len,
    )
