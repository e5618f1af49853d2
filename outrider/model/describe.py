"""What a checkpoint is, read from its small files: no torch, no weights in memory."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError

# Pieces of each weight file that go into the fingerprint; the whole of a large checkpoint
# would take minutes to hash.
_SAMPLES = 64
_SAMPLE_BYTES = 4096
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".gguf"}
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
# Keys of config.json that say who wrote it, not what the model is.
_VOLATILE_KEYS = {"_name_or_path", "_model_name_or_path", "transformers_version", "use_cache"}


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A checkpoint in a few words.

    Two checkpoints with one `fingerprint` give the same tokens; it is empty where the weights
    are not at hand. `context_len` counts tokens,
    prompt included. `vocab_size` is the number of rows of the embedding, padding included.
    """

    name: str
    fingerprint: str
    context_len: int
    vocab_size: int
    stop_ids: frozenset[int]


def describe(path: str) -> ModelDescription:
    """Describe a transformers directory, a .gguf file or a directory with one in it.

    Raises:
        ConfigError: there is no such checkpoint, or its config lacks what is needed.
    """
    where = locate_checkpoint(path)
    if where.suffix == ".gguf":
        return _describe_gguf(where)
    config = json.loads((where / "config.json").read_text())
    text_config = {**config, **config.get("text_config", {})}
    context_len = next((text_config[key] for key in _CONTEXT_KEYS if text_config.get(key)), 0)
    if not context_len or not text_config.get("vocab_size"):
        raise ConfigError(f"{path}/config.json tells no context length or no vocabulary size")
    return ModelDescription(
        name=where.resolve().name,
        fingerprint=_fingerprint(config, _weight_files(where)),
        context_len=int(context_len),
        vocab_size=int(text_config["vocab_size"]),
        stop_ids=_stop_ids(where, text_config),
    )


def locate_checkpoint(path: str) -> Path:
    """The directory or .gguf file to load; raises `ConfigError` if there is none at `path`."""
    where = Path(path)
    if (where.suffix == ".gguf" and where.is_file()) or (where / "config.json").is_file():
        return where
    files = sorted(where.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    several = f"; there are {len(files)} .gguf files, name one" if files else ""
    raise ConfigError(
        f"no model at {path!r}: it must be a directory with a config.json "
        f"(as save_pretrained writes it) or a .gguf file{several}"
    )


def _weight_files(where: Path) -> list[Path]:
    return sorted(file for file in where.iterdir() if file.suffix in _WEIGHT_SUFFIXES)


def _stop_ids(where: Path, config: dict[str, Any]) -> frozenset[int]:
    generation_file = where / "generation_config.json"
    generation = json.loads(generation_file.read_text()) if generation_file.is_file() else {}
    ids = generation.get("eos_token_id", config.get("eos_token_id"))
    if ids is None:
        return frozenset()
    return frozenset(ids if isinstance(ids, list) else [ids])


def _fingerprint(config: dict[str, Any], weights: list[Path]) -> str:
    if not weights:
        return ""
    kept = {key: value for key, value in config.items() if key not in _VOLATILE_KEYS}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode())
    for file in weights:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as stream:
            for sample in range(_SAMPLES):
                stream.seek(size * sample // _SAMPLES)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def _describe_gguf(file: Path) -> ModelDescription:
    from gguf import GGUFReader

    reader = GGUFReader(file)

    def value(key: str) -> Any:
        field = reader.get_field(key)
        return None if field is None else field.contents()

    architecture = value("general.architecture")
    context_len = value(f"{architecture}.context_length")
    tokens = reader.get_field("tokenizer.ggml.tokens")
    if not context_len or tokens is None:
        raise ConfigError(f"{file} tells no context length or no vocabulary")
    eos = value("tokenizer.ggml.eos_token_id")
    return ModelDescription(
        name=file.stem,
        fingerprint=_fingerprint({}, [file]),
        context_len=int(context_len),
        vocab_size=len(tokens.data),
        stop_ids=frozenset() if eos is None else frozenset([int(eos)]),
    )
