"""The weights of a checkpoint in safetensors, under the names that the module gives them."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from outrider.errors import ConfigError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class Checkpoint:
    """Reads slices while it is entered; nothing else of a file comes into memory."""

    def __init__(self, where: Path, module: PreTrainedModel) -> None:
        """`module` may be on the meta device.

        Raises:
            ConfigError: there are no safetensors.
        """
        self._where = where
        self._file_of = _files(where)
        self._key_of = _keys_by_name(self._file_of, module)
        self._opened: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for name in sorted(set(self._file_of.values())):
            opened: Any = safe_open(self._where / name, framework="pt", device="cpu")
            self._opened[name] = self._stack.enter_context(opened)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._opened.clear()
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._key_of

    def source(self, name: str, shape: tuple[int, ...]) -> Any:
        """The weight as an object of safetensors that gives slices of it.

        Raises:
            ConfigError: it has another shape.
        """
        key = self._key_of[name]
        source = self._opened[self._file_of[key]].get_slice(key)
        found = tuple(source.get_shape())
        if found != shape:
            raise ConfigError(f"{self._where}: {key} is {found}, the model has {shape}")
        return source

    def bytes_of(self, name: str, part: torch.Tensor) -> int:
        """What a slice takes in the file, where it has the type that it is read in."""
        return part.numel() * part.element_size()


def _files(where: Path) -> dict[str, str]:
    """The file of every weight, by its name in the checkpoint."""
    if (where / _INDEX).is_file():
        files: dict[str, str] = json.loads((where / _INDEX).read_text())["weight_map"]
        return files
    if not (where / _SINGLE).is_file():
        raise ConfigError(f"{where} has neither {_SINGLE} nor {_INDEX}")
    single: Any = safe_open(where / _SINGLE, framework="pt")
    with single as opened:
        return dict.fromkeys(opened.keys(), _SINGLE)


def _keys_by_name(keys: Mapping[str, str], module: PreTrainedModel) -> dict[str, str]:
    """Names in the checkpoint by those in the module, renamed as transformers would.

    Weights that transformers would put together from several are left out.
    """
    changes = get_model_conversion_mapping(module)
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    others: Any = [change for change in changes if not isinstance(change, WeightRenaming)]
    known = module.state_dict()
    found = {}
    for key in keys:
        name, converter = rename_source_key(key, renamings, others, module.base_model_prefix, known)
        if converter is None:
            found[name] = key
    return found
