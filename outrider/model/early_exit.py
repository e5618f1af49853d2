"""A model that stops early: its first layers, then its own last norm and head."""

from dataclasses import replace
from typing import Any

import torch

from outrider.errors import ConfigError, UnsupportedModelError
from outrider.model.loading import LoadedModel


def first_layers(model: LoadedModel, count: int) -> LoadedModel:
    """The model with its first `count` layers alone; `model` itself is cut.

    Embeddings, norm and head stay, so the hidden state after those layers is read as if it were
    the last one. The weights of the other layers are freed.

    Raises:
        ConfigError: the model has no more than `count` layers, or `count` is below 1.
        UnsupportedModelError: its layers can't be told from its config.
    """
    config: Any = model.module.config.get_text_config()
    total = int(config.num_hidden_layers)
    if not 1 <= count < total:
        raise ConfigError(
            f"{model.name} has {total} layers; use the first 1 to {total - 1} of them"
        )
    stacks = [
        module
        for module in model.module.modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == total
    ]
    if len(stacks) != 1:
        raise UnsupportedModelError(
            f"{config.model_type} keeps its {total} layers in {len(stacks)} lists; one is needed"
        )
    del stacks[0][count:]
    config.num_hidden_layers = count
    # Some families name the kind of each layer.
    kinds = getattr(config, "layer_types", None)
    if kinds:
        config.layer_types = kinds[:count]
    return replace(
        model,
        name=f"{model.name}-first-{count}",
        fingerprint=f"{model.fingerprint}/first-{count}",
    )
