"""What a model takes on each of N ranks, and what is left for KV; no weights are needed for it."""

from dataclasses import dataclass, replace

from outrider.errors import ConfigError
from outrider.memory import format_bytes
from outrider.model.blocks import BLOCK_TOKENS
from outrider.model.paged import block_bytes
from outrider.model.parallel.outline import outline_shard

# Of a GPU's memory that the weights leave free, what KV gets by itself; the rest is for
# activations, for what the libraries keep, and for sums on their way.
CUDA_SHARE = 0.85


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One rank: its weights, what it has for KV, and what one block of KV takes there.

    `second_bytes` are for packed weights that are kept a second time: at most so much, where
    unpacking them for many rows is measured to be quicker. KV gets none of it.
    """

    rank: int
    weights_bytes: int
    kv_bytes: int
    block_bytes: int
    second_bytes: int = 0

    @property
    def blocks(self) -> int:
        """Blocks that fit on this rank."""
        return self.kv_bytes // self.block_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """A model over ranks of `gpu_bytes` each."""

    name: str
    dtype: str
    context_len: int
    gpu_bytes: int
    ranks: tuple[RankMemory, ...]

    @property
    def blocks(self) -> int:
        """Blocks of KV; a block has a part on every rank."""
        return min(rank.blocks for rank in self.ranks)

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV fits."""
        return self.blocks * BLOCK_TOKENS

    def sessions(self, tokens: int) -> int:
        """Sessions of so many tokens whose KV fits at once."""
        return self.blocks // -(-tokens // BLOCK_TOKENS)


def plan_memory(
    path: str, size: int, gpu_bytes: int, *, dtype: str = "bfloat16", packed: bool = False
) -> MemoryPlan:
    """What the model of a config.json or a .gguf file takes on each of `size` ranks.

    `packed`: the weights of a .gguf file stay in few bits, as they do on a CPU.

    Raises:
        ConfigError: there is no config.json, or the weights leave no room for a block of KV.
        UnsupportedModelError: it can't be served exactly, or can't be split over so many ranks.
    """
    ranks: list[RankMemory] = []
    for rank in range(size):
        if 1 < rank < size - 1:
            # Rank 0 has all biases, and the last may have less of the vocabulary.
            ranks.append(replace(ranks[1], rank=rank))
            continue
        outline = outline_shard(path, rank, size, dtype=dtype, packed=packed)
        kept, second = outline.kept_bytes, outline.second_bytes
        left = int(CUDA_SHARE * max(gpu_bytes - kept - second, 0))
        ranks.append(RankMemory(rank, kept, left, block_bytes(outline.model), second))
        if not ranks[-1].blocks:
            raise ConfigError(
                f"rank {rank} of {size} has no room: its weights take "
                f"{format_bytes(kept + second)} of {format_bytes(gpu_bytes)} in {dtype}, a "
                f"block of KV {format_bytes(ranks[-1].block_bytes)}; take more ranks"
            )
    model = outline.model
    return MemoryPlan(model.name, dtype, model.context_len, gpu_bytes, tuple(ranks))
