"""The embeddings and the head of a checkpoint, without the rest of its weights."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.errors import ConfigError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class Weights:
    """Tensors of a transformers directory by name, each read when it is asked for."""

    def __init__(self, path: str) -> None:
        """Raises `ConfigError` where there are no safetensors files."""
        self._path = Path(path)
        index = self._path / _INDEX
        if index.is_file():
            self._files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        elif (self._path / _SINGLE).is_file():
            with safe_open(str(self._path / _SINGLE), "pt") as file:
                self._files = dict.fromkeys(file.keys(), _SINGLE)
        else:
            raise ConfigError(f"no {_SINGLE} in {path}")

    @property
    def names(self) -> frozenset[str]:
        """What there is."""
        return frozenset(self._files)

    def tensor(self, name: str) -> torch.Tensor:
        """In the type that it is kept in; raises `ConfigError` where there is none."""
        if name not in self._files:
            raise ConfigError(f"no tensor {name} in {self._path}")
        with safe_open(str(self._path / self._files[name]), "pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor


class Tables:
    """The embeddings [V, hidden] and the head [V, hidden] of a model, in the type of its files."""

    def __init__(self, path: str) -> None:
        """Raises `ConfigError` where they can't be found."""
        self._weights = Weights(path)
        factory: Any = AutoModelForCausalLM
        with torch.device("meta"):
            # A skeleton says what they are called, and whether the two are one.
            module = factory.from_config(AutoConfig.from_pretrained(path))
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._embeddings = names[id(module.get_input_embeddings().weight)]
        self._head = names[id(module.get_output_embeddings().weight)]

    def embeddings(self) -> torch.Tensor:
        """A row an id."""
        return self._weights.tensor(self._embeddings)

    def head(self) -> torch.Tensor:
        """A row an id; the embeddings where the two are one."""
        return self._weights.tensor(self._head)
