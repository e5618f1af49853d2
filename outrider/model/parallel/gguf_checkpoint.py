"""The weights of a GGUF file, in slices: a file that is mapped, of which only those are looked at.

A row of a weight is whole in the file, one block of 32 numbers (or whatever its type has) after
the other. So any rows can be read by themselves, and columns by whole blocks.
"""

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from transformers import PreTrainedModel

from outrider.errors import ConfigError, UnsupportedModelError
from outrider.model.linears.int4 import GROUP, TYPES, Quantised
from outrider.model.linears.packed import PackedWeight

# Families whose tensors are those of transformers; "llama" has its rotated pairs side by side.
_PAIRED = "llama"
_ARCHITECTURES = (_PAIRED, "qwen2", "qwen3")
# Rows that are unpacked at a time.
_CHUNK = 1024
Range = tuple[int, int]


class GgufTensor:
    """A tensor of a file with its rows in the order of transformers; slices of it are float32."""

    def __init__(self, tensor: Any, order: np.ndarray | None) -> None:
        # Only needed for GGUF files.
        import gguf

        self.shape = tuple(int(length) for length in reversed(tensor.shape))
        self._kind = tensor.tensor_type
        self._data: np.ndarray = tensor.data
        self._order = order
        plain = self._data.dtype != np.uint8
        self._block: int
        self._bytes: int  # of a block, in items of the data
        self._block, self._bytes = (1, 1) if plain else gguf.GGML_QUANT_SIZES[self._kind]
        self._itemsize: int = self._data.itemsize

    @property
    def bits(self) -> int:
        """Of a number, where it can stay packed; 0 where it can't."""
        return TYPES.get(self._kind.name, 0) if len(self.shape) > 1 else 0

    def bytes_of(self, numbers: int) -> int:
        """What so many numbers take in the file."""
        return numbers * self._bytes * self._itemsize // self._block

    def packed(self, rows: Range, columns: Range) -> PackedWeight:
        """A slice as it is in the file; `columns` are whole groups."""
        begin, end = (column // self._block * self._bytes for column in columns)

        def read() -> Quantised:
            return Quantised.read(self._kind.name, self._rows(*rows)[:, begin:end])

        return PackedWeight(rows[1] - rows[0], columns[1] - columns[0], self.bits, read)

    def __getitem__(self, index: slice | tuple[slice, slice]) -> torch.Tensor:
        """[rows] or [rows, columns] as numbers; columns need not be whole groups."""
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        first, last, _ = rows.indices(self.shape[0])
        if len(self.shape) == 1:
            return self._numbers(self._rows(first, last))
        begin, end, _ = columns.indices(self.shape[1])
        result = torch.empty(last - first, end - begin)
        aligned = begin // self._block, -(-end // self._block)
        raw = slice(*(block * self._bytes for block in aligned))
        kept = slice(begin - aligned[0] * self._block, end - aligned[0] * self._block)
        for row in range(first, last, _CHUNK):
            until = min(row + _CHUNK, last)
            result[row - first : until - first] = self._numbers(self._rows(row, until)[:, raw])[
                :, kept
            ]
        return result

    def _rows(self, begin: int, end: int) -> np.ndarray:
        """As they are in the file."""
        return self._data[begin:end] if self._order is None else self._data[self._order[begin:end]]

    def _numbers(self, raw: np.ndarray) -> torch.Tensor:
        import gguf

        numbers = gguf.dequantize(np.ascontiguousarray(raw), self._kind)
        return torch.from_numpy(np.array(numbers, np.float32))


class GgufCheckpoint:
    """The tensors of a file by the names of a module; see `shards.Weights`."""

    def __init__(self, file: Path, module: PreTrainedModel) -> None:
        """`module` may be on the meta device.

        Raises:
            UnsupportedModelError: its tensors are not known to be those of transformers.
        """
        import gguf

        untyped: Any = module
        reader = gguf.GGUFReader(file)
        architecture = str(reader.fields["general.architecture"].contents())
        if architecture not in _ARCHITECTURES:
            raise UnsupportedModelError(
                f"{file} is of architecture {architecture}; in slices only files of "
                f"{', '.join(_ARCHITECTURES)} are read: convert it to safetensors to split it"
            )
        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        config = untyped.config
        names = gguf.get_tensor_name_map(kinds[architecture], config.num_hidden_layers)
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        pairs = {}
        if architecture == _PAIRED:
            heads = config.num_attention_heads
            kv_heads = getattr(config, "num_key_value_heads", None) or heads
            pairs = {"attn_q": heads, "attn_k": kv_heads}
        self._file = file
        self._tensors: dict[str, GgufTensor] = {}
        for path in module.state_dict():
            name, _, leaf = path.rpartition(".")
            found = tensors.get(f"{names.get_name(name)}.{leaf}")
            if found is not None:
                part = found.name.split(".")[-2]
                self._tensors[path] = GgufTensor(found, _order(found, pairs.get(part, 0)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """The file stays mapped for as long as a layer may look at it."""

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def source(self, name: str, shape: tuple[int, ...]) -> GgufTensor:
        """A tensor, which gives slices of itself.

        Raises:
            ConfigError: it has another shape.
        """
        found = self._tensors[name]
        if found.shape != shape:
            raise ConfigError(f"{self._file}: {name} is {found.shape}, the model has {shape}")
        return found

    def bytes_of(self, name: str, part: torch.Tensor) -> int:
        """What a part of a tensor takes in the file."""
        return self._tensors[name].bytes_of(part.numel())


def groups_of(name: str, columns: Range, length: int, size: int) -> Range:
    """The columns of a rank, which have to be whole groups of a packed weight.

    Raises:
        UnsupportedModelError: they are not, with the figures.
    """
    if any(column % GROUP for column in columns):
        raise UnsupportedModelError(
            f"{name} can't be split over {size} ranks as it is packed: of its {length} inputs, "
            f"{length / GROUP:g} groups of {GROUP}, a rank would have {columns[1] - columns[0]}, "
            f"{(columns[1] - columns[0]) / GROUP:g} groups; take other --tensor-parallel-size, or "
            "unpack it with --linears dense"
        )
    return columns


def _order(tensor: Any, heads: int) -> np.ndarray | None:
    """Where the rows of queries and keys are in the file; None: where they belong."""
    if not heads:
        return None
    outputs = int(tensor.shape[-1])
    return np.arange(outputs).reshape(heads, -1, 2).swapaxes(1, 2).flatten()
