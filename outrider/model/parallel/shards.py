"""Load one rank's part of a model: only its slices are read from the checkpoint.

The module is built without memory, on the meta device; then every parameter gets its slice,
read from safetensors straight into the place it stays in, or unpacked from a .gguf file. What
stays packed is not read at all before it is laid out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.errors import ConfigError
from outrider.model import attention
from outrider.model.describe import describe, locate_checkpoint
from outrider.model.loading import DTYPES, LoadedModel, load_config
from outrider.model.parallel.checkpoint import Checkpoint
from outrider.model.parallel.gguf_checkpoint import GgufCheckpoint
from outrider.model.parallel.group import RankGroup
from outrider.model.parallel.linears import Peers, RowLinear, VocabularyEmbedding
from outrider.model.parallel.packing import Packing, pack_slices, weigh
from outrider.model.parallel.plan import Kind, Split, split_plan, vocabulary_range

_REPLICATED = Split(Kind.REPLICATED)


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a model, and what it took to load.

    `begin`, `end`: the ids whose logits this rank's head gives. `read_bytes` came from the
    checkpoint, `kept_bytes` stay; loading took at most `peak_bytes` at once. Packed layers count
    as they will be once they are laid out, and at most with one of them unpacked beside it all.
    """

    model: LoadedModel
    begin: int
    end: int
    read_bytes: int
    kept_bytes: int
    peak_bytes: int


def load_shard(
    path: str, group: RankGroup, *, dtype: str = "float32", packed: bool = False
) -> Shard:
    """This rank's part of a directory with safetensors or a .gguf file; talks to no other rank.

    `packed`: weights of a .gguf file stay as they are there, for linears that take them so.

    Raises:
        ConfigError: there is no such checkpoint, or it lacks a weight.
        UnsupportedModelError: it can't be served exactly, or can't be split over so many ranks.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}; choose one of {', '.join(DTYPES)}")
    where = locate_checkpoint(path)
    gguf = where if where.suffix == ".gguf" else None
    module = empty_model(load_config(where), DTYPES[dtype])
    plan = split_plan(module, group.size)
    description = describe(path)
    vocabulary = module.get_input_embeddings().weight.shape[0]
    begin, end = vocabulary_range(group.rank, group.size, vocabulary)
    _make_buffers(module, group.device)
    reader = Reader(module, plan, group, DTYPES[dtype])
    packed_bytes = 0
    with GgufCheckpoint(gguf, module) if gguf else Checkpoint(where, module) as checkpoint:
        if packed and isinstance(checkpoint, GgufCheckpoint):
            packed_bytes = pack_slices(module, plan, group.rank, group.size, checkpoint)
        reader.fill(checkpoint)
    join_ranks(module, plan, begin, group)
    packing = weigh(module, packed_bytes, DTYPES[dtype].itemsize) if packed else Packing()
    kept_bytes = reader.kept_bytes + packing.kept_bytes
    return Shard(
        model=LoadedModel.of(module, description, vocabulary, gguf),
        begin=begin,
        end=end,
        read_bytes=reader.read_bytes + packing.read_bytes,
        kept_bytes=kept_bytes,
        peak_bytes=max(reader.peak_bytes, kept_bytes + packing.largest_bytes),
    )


def empty_model(config: Any, dtype: torch.dtype) -> Any:
    """The model of a config on the meta device, without weights."""
    attention.register()
    untyped: Any = AutoModelForCausalLM
    with torch.device("meta"):
        return untyped.from_config(config, dtype=dtype, attn_implementation=attention.NAME)


class Place(Peers, Protocol):
    """Which rank of how many, and where its weights go; see `RankGroup`."""

    @property
    def rank(self) -> int:
        """From 0."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        ...


class Weights(Protocol):
    """Where parameters come from; see `Checkpoint`."""

    def __contains__(self, name: str) -> bool: ...
    def source(self, name: str, shape: tuple[int, ...]) -> Any:
        """What gives slices of a parameter."""
        ...

    def bytes_of(self, name: str, part: torch.Tensor) -> int:
        """What a slice takes in the file."""
        ...


class Reader:
    """Puts a rank's slices into the parameters of a module, and counts their bytes."""

    def __init__(
        self,
        module: PreTrainedModel,
        plan: Mapping[str, Split],
        group: Place,
        dtype: torch.dtype,
    ) -> None:
        self.read_bytes = self.kept_bytes = self.peak_bytes = 0
        self._module, self._plan = module, plan
        self._group, self._dtype = group, dtype

    def fill(self, checkpoint: Weights) -> None:
        """Give every parameter its slice; those that are one stay one.

        Raises:
            ConfigError: the checkpoint has no such weight, or one of another shape.
        """
        for parameters in _shared(self._module):
            name = next((n for n in parameters if n in checkpoint), None)
            if name is None:
                raise ConfigError(f"the checkpoint has no weight {parameters[0]}")
            value = self._read(checkpoint, name)
            own = None if value is None else torch.nn.Parameter(value, requires_grad=False)
            for each in parameters:
                self._put(each, own)

    def _put(self, name: str, value: torch.nn.Parameter | None) -> None:
        parent_name, _, leaf = name.rpartition(".")
        parent: Any = self._module.get_submodule(parent_name)
        setattr(parent, leaf, value)
        if value is None or leaf != "weight":
            return
        if isinstance(parent, torch.nn.Linear):
            parent.out_features, parent.in_features = value.shape
        elif isinstance(parent, torch.nn.Embedding):
            parent.num_embeddings = len(value)
            parent.padding_idx = None

    def _read(self, checkpoint: Weights, name: str) -> torch.Tensor | None:
        """This rank's slice; None for a bias that is another rank's."""
        module_name, _, leaf = name.rpartition(".")
        split = self._plan.get(module_name, _REPLICATED)
        shape = tuple(self._module.get_parameter(name).shape)
        source = checkpoint.source(name, shape)
        rank, size = self._group.rank, self._group.size
        if split.kind is Kind.ROW and leaf == "bias":
            if rank:
                return None
            split = _REPLICATED
        along = 1 if split.kind is Kind.ROW else 0
        begin, end = split.range(rank, size, shape[along])
        part: torch.Tensor = source[:, begin:end] if along else source[begin:end]
        kept = part.to(device=self._group.device, dtype=self._dtype)
        self.read_bytes += checkpoint.bytes_of(name, part)
        self.kept_bytes += kept.numel() * kept.element_size()
        beside = 0 if kept is part else part.numel() * part.element_size()
        self.peak_bytes = max(self.peak_bytes, self.kept_bytes + beside)
        return kept.contiguous()


def _shared(module: PreTrainedModel) -> Iterator[list[str]]:
    """The names of every parameter; several where two modules have the same one."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    yield from names.values()


def _make_buffers(module: Any, device: torch.device) -> None:
    """Compute what is kept beside the weights, such as the frequencies of rotary embeddings."""
    for child in module.modules():
        own = dict(child.named_buffers(recurse=False))
        if not any(buffer.is_meta for buffer in own.values()):
            continue
        for name, buffer in own.items():
            setattr(child, name, torch.empty_like(buffer, device=device))
        # The model's own code for it also draws weights, which are without memory still.
        module._init_weights(child)


def join_ranks(
    module: PreTrainedModel, plan: Mapping[str, Split], begin: int, group: Place
) -> None:
    """Put the layers that need other ranks in the place of those that do not know of them."""
    embedding = module.get_input_embeddings()
    _share_heads(module, plan, group.size)
    for name, split in plan.items():
        parent_name, _, leaf = name.rpartition(".")
        parent, child = module.get_submodule(parent_name), module.get_submodule(name)
        if split.kind is Kind.ROW and isinstance(child, torch.nn.Linear):
            setattr(parent, leaf, RowLinear(child, group))
        elif child is embedding and isinstance(child, torch.nn.Embedding):
            setattr(parent, leaf, VocabularyEmbedding(child, begin, group))


def _share_heads(module: Any, plan: Mapping[str, Split], size: int) -> None:
    """Tell attention how many of its rank's heads read one head of keys and values."""
    units = {name.rpartition(".")[2]: split.units for name, split in plan.items()}
    if "q_proj" not in units or "k_proj" not in units:
        return
    heads, kv_heads = (max(units[name] // size, 1) for name in ("q_proj", "k_proj"))
    for child in module.modules():
        if hasattr(child, "num_key_value_groups"):
            child.num_key_value_groups = heads // kv_heads
