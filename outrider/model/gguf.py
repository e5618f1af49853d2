"""The quantised tensors of a GGUF file, for the linear layers of the model read from it."""

from pathlib import Path
from typing import Any

import torch

from outrider import logs
from outrider.model.linears.int4 import TYPES, Quantised


class GgufWeights:
    """Finds, for a linear layer that was loaded from a file, the integers that it came from."""

    def __init__(self, path: Path, module: torch.nn.Module) -> None:
        # Only needed for GGUF files.
        import gguf

        reader = gguf.GGUFReader(path)
        tensors: dict[str, Any] = {tensor.name: tensor for tensor in reader.tensors}
        architecture = reader.fields["general.architecture"].contents()
        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        layers = int(reader.fields[f"{architecture}.block_count"].contents())
        self._names = gguf.get_tensor_name_map(kinds[architecture], layers)
        self._heads = {
            int(reader.fields[f"{architecture}.attention.{name}"].contents())
            for name in ("head_count", "head_count_kv")
        }
        self._tensors = tensors
        self._paths = {id(child): name for name, child in module.named_modules()}
        self._found: dict[str, Quantised | None] = {}

    def find(self, linear: torch.nn.Module) -> Quantised | None:
        """The integers of a layer; None if its tensor is of another type.

        What is returned gives the layer's own weight, to the last bit.
        """
        path = self._paths.get(id(linear), "")
        if path not in self._found:
            self._found[path] = self._search(path, linear)
        return self._found[path]

    def _search(self, path: str, linear: Any) -> Quantised | None:
        name = self._names.get_name(path)
        tensor = self._tensors.get(f"{name}.weight")
        if tensor is None and path == "lm_head":
            tensor = self._tensors.get("token_embd.weight")
        if tensor is None or tensor.tensor_type.name not in TYPES:
            return None
        weight = Quantised.read(tensor.tensor_type.name, tensor.data)
        for candidate in (
            weight,
            *(weight.rows(order) for order in self._orders(len(tensor.data))),
        ):
            if torch.equal(candidate.dense(), linear.weight.detach().float()):
                return candidate
        logs.get(__name__).warning("weight is not the file's own; kept unpacked", layer=path)
        return None

    def _orders(self, outputs: int) -> list[torch.Tensor]:
        """How llama.cpp orders the outputs of queries and keys: rotated pairs are neighbours."""
        return [
            torch.arange(outputs).view(heads, -1, 2).transpose(1, 2).flatten()
            for heads in sorted(self._heads)
            if outputs % (2 * heads) == 0
        ]
