"""Load a causal language model, or refuse it with the reason when it can't be exact here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from outrider.errors import ConfigError, UnsupportedModelError
from outrider.model import attention
from outrider.model.describe import ModelDescription, describe, locate_checkpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Layers whose past is held in keys and values alone, so that rejected tokens leave no trace.
_PAGED_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Rotary embeddings that depend on the longest sequence of the batch.
_BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal LM in eval mode, its attention being `outrider.model.attention`.

    `gguf` is the file that it was unpacked from, if it was. The other fields are those of
    `outrider.model.describe.ModelDescription`.
    """

    module: PreTrainedModel
    name: str
    fingerprint: str
    context_len: int
    vocab_size: int
    stop_ids: frozenset[int]
    gguf: Path | None = None

    @classmethod
    def of(
        cls,
        module: Any,
        description: ModelDescription,
        vocab_size: int,
        gguf: Path | None = None,
    ) -> Self:
        """A module, or one rank's part of it, and what its checkpoint says of itself."""
        return cls(
            module=module.eval(),
            name=description.name,
            fingerprint=description.fingerprint,
            context_len=description.context_len,
            vocab_size=vocab_size,
            stop_ids=description.stop_ids,
            gguf=gguf,
        )


def load_model(path: str, *, dtype: str = "float32", device: str = "cpu") -> LoadedModel:
    """Load a transformers directory or a .gguf file (its weights are unpacked to `dtype`).

    A directory that holds one .gguf file and no config.json stands for that file.

    Raises:
        ConfigError: there is no checkpoint at `path`, or it can't be read.
        UnsupportedModelError: it can't be served exactly; the message says why.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}; choose one of {', '.join(DTYPES)}")
    checkpoint = locate_checkpoint(path)
    attention.register()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # no hints there
    where, source = _source(checkpoint)
    config = load_config(checkpoint)
    description = describe(path)
    if source:
        source["quantization_config"] = GgufConfig(dequantize=True)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            where, dtype=DTYPES[dtype], attn_implementation=attention.NAME, **source
        )
    except KeyError as error:
        raise UnsupportedModelError(
            f"{config.model_type} takes no attention implementation from outside"
        ) from error
    except (ValueError, OSError) as error:
        raise UnsupportedModelError(f"transformers can't load {path}: {error}") from error
    module = loaded.to(device)
    vocabulary = loaded.get_input_embeddings().weight.shape[0]
    return LoadedModel.of(module, description, vocabulary, checkpoint if source else None)


def load_config(checkpoint: Path) -> Any:
    """The config of a directory or .gguf file.

    Raises:
        UnsupportedModelError: it can't be read, or such a model can't be served exactly.
    """
    where, source = _source(checkpoint)
    try:
        config = AutoConfig.from_pretrained(where, **source)
    except (ValueError, KeyError, OSError) as error:
        raise UnsupportedModelError(f"transformers can't read {checkpoint}: {error}") from error
    check_supported(config)
    return config


def _source(path: Path) -> tuple[Path, dict[str, Any]]:
    """The directory, and the further arguments of `from_pretrained`."""
    if path.suffix == ".gguf":
        return path.parent, {"gguf_file": path.name}
    return path, {}


def _layer_types(config: Any) -> set[str]:
    """The layer types that a config names, under whichever name its family uses."""
    names = ("layer_types", "layers_block_type", "block_types")
    found = (getattr(config, name, None) for name in names)
    return {str(kind) for kinds in found if kinds for kind in kinds} - {"attention"}


def check_supported(config: Any) -> None:
    """Refuse what keys and values by position can't serve exactly.

    Raises:
        UnsupportedModelError: with the reason.
    """
    text = config.get_text_config()
    kind = text.model_type
    if config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{kind} is an encoder-decoder; Outrider serves decoder-only models"
        )
    strange = _layer_types(text) - _PAGED_LAYER_TYPES
    if strange or not hasattr(text, "num_attention_heads"):
        strange = strange or {"recurrent"}
        raise UnsupportedModelError(
            f"{kind} has layers of type {', '.join(sorted(strange))}, which keep a recurrent or "
            "chunked state that can't be rolled back after a rejected draft"
        )
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type")} | {
        part.get("rope_type") for part in rope.values() if isinstance(part, dict)
    }
    if kinds & _BATCH_DEPENDENT_ROPE:
        raise UnsupportedModelError(
            f"{kind} uses rotary embeddings of type "
            f"{', '.join(sorted(str(k) for k in kinds & _BATCH_DEPENDENT_ROPE))}, which change "
            "with the longest sequence in the batch: a session would depend on its neighbours"
        )
