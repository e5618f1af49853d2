"""The model that this coordinator serves: what it needs to know without the weights."""

from dataclasses import dataclass

from coordinator.detokenizer import Vocabulary
from outrider.model.describe import describe
from outrider.model.tokenizers import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model by the name that clients use; `context_len` counts tokens, prompt included."""

    name: str
    fingerprint: str
    context_len: int
    vocab_size: int
    stop_ids: frozenset[int]
    tokenizer: Tokenizer
    vocabulary: Vocabulary


def load_served_model(path: str, served_name: str = "") -> ServedModel:
    """Read the tokenizer and the configuration; takes a second or so, and blocks.

    Raises:
        ConfigError: there is no such model, or it has no fast tokenizer.
    """
    description = describe(path)
    tokenizer = load_tokenizer(path)
    return ServedModel(
        name=served_name or description.name,
        fingerprint=description.fingerprint,
        context_len=description.context_len,
        vocab_size=description.vocab_size,
        stop_ids=description.stop_ids,
        tokenizer=tokenizer,
        vocabulary=Vocabulary(tokenizer.backend),
    )
