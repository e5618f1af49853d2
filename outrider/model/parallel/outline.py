"""One rank's part of a model without its numbers, for plans of memory."""

from dataclasses import dataclass

import torch

from outrider.errors import UnsupportedModelError
from outrider.model.describe import describe, locate_checkpoint
from outrider.model.loading import DTYPES, LoadedModel
from outrider.model.parallel.plan import split_plan, vocabulary_range
from outrider.model.parallel.shards import Reader, empty_model, join_ranks


@dataclass(frozen=True, slots=True)
class Outline:
    """One rank's part of a model on the meta device: everything but the numbers.

    `kept_bytes` are what its weights would take.
    """

    model: LoadedModel
    kept_bytes: int


def outline_shard(path: str, rank: int, size: int, *, dtype: str = "float32") -> Outline:
    """What `load_shard` would give that rank, of a checkpoint that may have no weights yet.

    Raises:
        ConfigError: there is no config.json.
        UnsupportedModelError: it can't be served exactly, or can't be split over so many ranks.
    """
    where = locate_checkpoint(path)
    if where.suffix == ".gguf":
        raise UnsupportedModelError(f"{path} is a .gguf file: its shapes are known once it is read")
    module = empty_model(where, DTYPES[dtype])
    plan = split_plan(module, size) if size > 1 else {}
    description = describe(path)
    vocabulary = module.get_input_embeddings().weight.shape[0]
    alone = _Nobody(rank, size, torch.device("meta"))
    reader = Reader(module, plan, alone, DTYPES[dtype])
    reader.fill(_NoWeights())
    begin, _ = vocabulary_range(rank, size, vocabulary)
    join_ranks(module, plan, begin, alone)
    model = LoadedModel(
        module=module.eval(),
        name=description.name,
        fingerprint=description.fingerprint,
        context_len=description.context_len,
        vocab_size=vocabulary,
        stop_ids=description.stop_ids,
    )
    return Outline(model, reader.kept_bytes)


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
