"""Put layers over packed slices of a file in the place of plain ones."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from outrider.model.lean import LeanDecoder
from outrider.model.linears.packed import QuantisedLinear, Weigher
from outrider.model.parallel.gguf_checkpoint import GgufCheckpoint, groups_of
from outrider.model.parallel.plan import Kind, Split
from outrider.model.parts import parts_of


@dataclass(frozen=True, slots=True)
class Packing:
    """What the packed layers of a rank take.

    `read_bytes` are in the file, `kept_bytes` in memory once they are laid out, and
    `second_bytes` at most beside them (see `Weigher`). `largest_bytes`: the largest unpacked.
    """

    read_bytes: int = 0
    kept_bytes: int = 0
    second_bytes: int = 0
    largest_bytes: int = 0


def pack_slices(
    module: PreTrainedModel,
    plan: Mapping[str, Split],
    rank: int,
    size: int,
    checkpoint: GgufCheckpoint,
) -> int:
    """Give every layer whose weight is packed in the file its rank's slice of it.

    Returns:
        The bytes of these slices in the file.

    Raises:
        UnsupportedModelError: groups of columns would be cut.
    """
    untyped: Any = module
    embedding = untyped.get_input_embeddings()
    own = {id(child): name for name, child in module.named_modules()}
    read_bytes = 0
    for name, child in list(module.named_modules()):
        if type(child) is not torch.nn.Linear:
            continue
        # The embedding may be the head, too; it is in the file once then.
        tied = child.weight is embedding.weight
        key = f"{own[id(embedding)] if tied else name}.weight"
        if key not in checkpoint:
            continue
        shape = tuple(child.weight.shape)
        source = checkpoint.source(key, shape)
        if not source.bits:
            continue
        split = plan.get(name, Split(Kind.REPLICATED))
        along_columns = split.kind is Kind.ROW
        part = split.range(rank, size, shape[1 if along_columns else 0])
        rows, columns = ((0, shape[0]), part) if along_columns else (part, (0, shape[1]))
        weight = source.packed(rows, groups_of(name, columns, shape[1], size))
        read_bytes += source.bytes_of(weight.outputs * weight.columns)
        bias: Any = child.bias
        parent, _, leaf = name.rpartition(".")
        setattr(
            module.get_submodule(parent), leaf, QuantisedLinear(weight, bias, child.weight.dtype)
        )
    return read_bytes


def weigh(module: PreTrainedModel, read_bytes: int, itemsize: int) -> Packing:
    """What the packed layers take as they will be put together; numbers of `itemsize` bytes."""
    weigher = Weigher(itemsize)
    packed = [child for child in module.modules() if isinstance(child, QuantisedLinear)]
    parts = parts_of(module)
    if parts is not None:
        LeanDecoder(parts, weigher.fuse)
    else:
        for child in packed:
            weigher.fuse([child])
    largest = max((child.out_features * child.in_features for child in packed), default=0)
    return Packing(read_bytes, weigher.kept_bytes, weigher.second_bytes, largest * itemsize)
