"""What a trained drafter's directory says of itself and of the target that it is for; no torch."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from outrider.errors import ConfigError
from outrider.model.describe import describe

# The key of config.json that makes a directory one of a trained drafter.
KEY = "outrider_draft"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """The part of config.json that is Outrider's.

    `reads_hidden`: tokens come with the hidden state that the target's head made them of, of
        `target_hidden` numbers; the target has `target_layers` layers.
    `own_embeddings`, `own_head`: they are in the directory, else they are the target's.
    """

    reads_hidden: bool
    target: str
    target_fingerprint: str
    target_hidden: int
    target_layers: int
    own_embeddings: bool
    own_head: bool

    @classmethod
    def of(cls, values: dict[str, Any], where: Path) -> Self:
        """Check and take what is known of `values`; raises `ConfigError`."""
        kinds: dict[str, Any] = {field.name: field.type for field in fields(cls)}
        for name, kind in kinds.items():
            if type(values.get(name)) is not kind:
                raise ConfigError(f"{where}: {KEY}.{name} has to be of type {kind.__name__}")
        return cls(**{name: values[name] for name in kinds})


def read_draft_config(path: str) -> DraftConfig | None:
    """The config of a trained drafter; None where `path` is another model.

    Raises:
        ConfigError: it is one, and its config is wrong.
    """
    where = Path(path) / "config.json"
    if not where.is_file():
        return None
    values = json.loads(where.read_text()).get(KEY)
    if values is None:
        return None
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: {KEY} has to be an object")
    return DraftConfig.of(values, where)


def check_target(path: str, draft: DraftConfig, target: str) -> str:
    """Check that a drafter fits a target; without one, that it needs none.

    Returns:
        What to warn of: the target is not the checkpoint that it was trained for, only one of the
        same sizes (a fine-tuned one, say). Drafts may be poorer then. Else nothing.

    Raises:
        ConfigError: the target is of other sizes, or it is missing.
    """
    if not target:
        if draft.own_embeddings and draft.own_head:
            return ""
        raise ConfigError(
            f"{path} reads the embeddings or the head of the target that it was trained for; "
            f"give --target, the directory of {draft.target}"
        )
    found = describe(target)
    hidden, layers = _sizes(target)
    if (hidden, layers) != (draft.target_hidden, draft.target_layers):
        raise ConfigError(
            f"{path} was trained for {draft.target}, of {draft.target_layers} layers and a hidden "
            f"size of {draft.target_hidden}, and the target is {found.name}, of {layers} and "
            f"{hidden}: use the model that it was trained for, or train a drafter for this one"
        )
    if found.fingerprint == draft.target_fingerprint:
        return ""
    return (
        f"{path} was trained for {draft.target} (fingerprint {draft.target_fingerprint}), and the "
        f"target is {found.name} (fingerprint {found.fingerprint}): its drafts may be poorer"
    )


def _sizes(target: str) -> tuple[int, int]:
    """Hidden size and layers of a transformers directory."""
    where = Path(target) / "config.json"
    if not where.is_file():
        raise ConfigError(
            f"a drafter that reads the target's embeddings or head needs the target as a "
            f"transformers directory, and {target} is none"
        )
    config = json.loads(where.read_text())
    text = {**config, **config.get("text_config", {})}
    hidden = text.get("hidden_size", text.get("n_embd", 0))
    return int(hidden), int(text.get("num_hidden_layers", text.get("n_layer", 0)))
