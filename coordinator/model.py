"""The model that this coordinator serves: what it needs to know without the weights."""

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.detokenizer import Vocabulary
from outrider.model.describe import describe
from outrider.model.tokenizers import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model by the name that clients use; `context_len` counts tokens, prompt included.

    `vocab_size` is that of the embeddings; ids from `token_count` on are padding, which the
    target never chooses.
    """

    name: str
    fingerprint: str
    context_len: int
    vocab_size: int
    stop_ids: frozenset[int]
    tokenizer: Tokenizer
    vocabulary: Vocabulary

    @property
    def token_count(self) -> int:
        """How many ids can come out."""
        return min(self.tokenizer.vocab_size, self.vocab_size)

    def encode_plain(self, text: str) -> tuple[int, ...]:
        """The ids of a text without any special tokens around it."""
        return tuple(self.vocabulary.backend.encode(text, add_special_tokens=False).ids)

    def show(self, token_ids: Sequence[int]) -> str:
        """The text of ids as the model is given it, special tokens shown."""
        return self.vocabulary.backend.decode(list(token_ids), skip_special_tokens=False)


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
