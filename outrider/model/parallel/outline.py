"""One rank's part of a model without its numbers, for plans of memory."""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from outrider.model.describe import describe, locate_checkpoint
from outrider.model.loading import DTYPES, LoadedModel, load_config
from outrider.model.parallel.gguf_checkpoint import GgufCheckpoint
from outrider.model.parallel.packing import Packing, pack_slices, weigh
from outrider.model.parallel.plan import split_plan, vocabulary_range
from outrider.model.parallel.shards import Reader, empty_model, join_ranks


@dataclass(frozen=True, slots=True)
class Outline:
    """One rank's part of a model on the meta device: everything but the numbers.

    `kept_bytes` are what its weights would take; of those that are packed `second_bytes` more at
    most are kept, as `Weigher` tells.
    """

    model: LoadedModel
    kept_bytes: int
    second_bytes: int = 0


def outline_shard(
    path: str, rank: int, size: int, *, dtype: str = "float32", packed: bool = False
) -> Outline:
    """What `load_shard` would give that rank, of a checkpoint that may have no weights yet.

    Raises:
        ConfigError: there is no config.json.
        UnsupportedModelError: it can't be served exactly, or can't be split over so many ranks.
    """
    where = locate_checkpoint(path)
    gguf = where if where.suffix == ".gguf" else None
    config, kept = load_config(where), DTYPES[dtype]
    module, kept_bytes = _outlined(config, rank, size, kept, gguf if packed else None)
    packing = weigh(module, 0, kept.itemsize) if packed else Packing()
    vocabulary = config.get_text_config().vocab_size
    model = LoadedModel.of(module, describe(path), vocabulary, gguf)
    return Outline(model, kept_bytes + packing.kept_bytes, packing.second_bytes)


def outline_of(model: LoadedModel, rank: int, size: int) -> LoadedModel:
    """The outline of a rank's part that is loaded; nothing is read for it."""
    config = copy.deepcopy(model.module.config)
    module, _ = _outlined(config, rank, size, model.module.dtype, None)
    return replace(model, module=module.eval())


def _outlined(
    config: Any, rank: int, size: int, dtype: torch.dtype, packed: Path | None
) -> tuple[Any, int]:
    """A rank's part on the meta device, and the bytes of its weights but those `packed` there."""
    module = empty_model(config, dtype)
    plan = split_plan(module, size) if size > 1 else {}
    vocabulary = module.get_input_embeddings().weight.shape[0]
    if packed is not None:
        pack_slices(module, plan, rank, size, GgufCheckpoint(packed, module))
    alone = _Nobody(rank, size, torch.device("meta"))
    reader = Reader(module, plan, alone, dtype)
    reader.fill(_NoWeights())
    begin, _ = vocabulary_range(rank, size, vocabulary)
    join_ranks(module, plan, begin, alone)
    return module, reader.kept_bytes


@dataclass(frozen=True, slots=True)
class _Nobody:
    """A rank that has no others: sums are what it has itself."""

    rank: int
    size: int
    device: torch.device

    def total(self, x: torch.Tensor) -> torch.Tensor:
        return x


class _NoWeights:
    """A checkpoint that has every weight, without its numbers."""

    def __contains__(self, name: str) -> bool:
        return True

    def source(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, device="meta")

    def bytes_of(self, name: str, part: torch.Tensor) -> int:
        return 0
