"""How much memory the target's KV gets."""

import torch

from outrider.errors import ConfigError
from outrider.memory import available_bytes, format_bytes, parse_bytes
from outrider.model.blocks import BLOCK_TOKENS
from outrider.model.memory_plan import CUDA_SHARE
from verify_worker.config import AUTO

# What `auto` takes of the memory that is free once the weights are loaded (on CUDA, `CUDA_SHARE`);
# the rest is for activations and for whatever else runs there. On a CPU the pages are touched at
# start, so that more than this is taken by those only who ask for it.
CPU_SHARE = 0.5
CPU_MOST = 4 * 2**30
# Tokens of a session, for comparisons of workers: what of the context most of them use.
USUAL_TOKENS = 1024


def budget_bytes(wanted: str, device: torch.device) -> int:
    """Bytes for KV: the size `wanted`, or with "auto" a share of what is free on `device`.

    Raises:
        ConfigError: it is no size, or the free memory is not known.
    """
    if wanted != AUTO:
        return parse_bytes(wanted)
    if device.type == "cuda":
        # What torch keeps of freed weights for itself is free, too.
        torch.cuda.empty_cache()
        return int(CUDA_SHARE * torch.cuda.mem_get_info(device)[0])
    if device.type == "cpu":
        return min(int(CPU_SHARE * available_bytes()), CPU_MOST)
    raise ConfigError(f"the free memory of {device} is not known; name a size for --kv-memory")


def pool_blocks(budget: int, bytes_per_block: int, most: int, wanted: str) -> int:
    """Blocks that fit into the budget, at most `most`.

    Raises:
        ConfigError: not a single one does.
    """
    blocks = min(budget // bytes_per_block, most)
    if blocks < 1:
        raise ConfigError(
            f"--kv-memory {wanted} gives {format_bytes(budget)}, a block of KV takes "
            f"{format_bytes(bytes_per_block)}; give more"
        )
    return blocks


def most_blocks(max_sessions: int, context_len: int) -> int:
    """Blocks that are of use: one session can't have more than the context."""
    return max_sessions * -(-context_len // BLOCK_TOKENS)


def sessions_held(blocks: int, context_len: int, max_sessions: int) -> int:
    """Sessions of a usual length whose KV is there at once; at least one, most `max_sessions`."""
    each = -(-min(context_len, USUAL_TOKENS) // BLOCK_TOKENS)
    return max(min(blocks // each, max_sessions), 1)


def statement(
    blocks: int, bytes_per_block: int, block_tokens: int, context_len: int
) -> dict[str, object]:
    """What the pool holds, as fields of a log line."""
    tokens = blocks * block_tokens
    return {
        "kv_memory": format_bytes(blocks * bytes_per_block),
        "kv_blocks": blocks,
        "kv_tokens": tokens,
        "full_contexts": round(tokens / context_len, 1),
    }
