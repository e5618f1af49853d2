"""Tokenizers: text to ids and back, and whether two models mean the same by an id.

The vocabulary is compared by content, id by id, added and special tokens included, as far as
the target can produce the ids. Importing this module loads neither torch nor transformers;
loading a tokenizer does.
"""

import hashlib
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import ConfigError, InvalidRequestError, TokenizerMismatchError

if TYPE_CHECKING:
    import tokenizers

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


class Tokenizer:
    """A fast transformers tokenizer; `name` is the path it was read from."""

    def __init__(self, name: str, wrapped: Any) -> None:
        self.name = name
        self._wrapped = wrapped

    @property
    def backend(self) -> "tokenizers.Tokenizer":
        """The tokenizer of the `tokenizers` library that does the work."""
        backend: tokenizers.Tokenizer = self._wrapped.backend_tokenizer
        return backend

    @cached_property
    def tokens(self) -> dict[int, str]:
        """The token of every id, added and special tokens included, in the order of ids.

        Converters to GGUF fill up the vocabulary to the size of the embeddings with tokens
        like `[PAD151666]`; those are padding, not vocabulary, and are left out.
        """
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        ids = sorted((token_id, token) for token, token_id in vocabulary.items())
        return {token_id: token for token_id, token in ids if token != f"[PAD{token_id}]"}

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return max(self.tokens, default=-1) + 1

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the vocabulary by content; equal exactly when `check_pair` passes for all."""
        digest = hashlib.sha256()
        for token_id, token in self.tokens.items():
            data = token.encode("utf-8", "surrogatepass")
            digest.update(token_id.to_bytes(4, "little") + len(data).to_bytes(4, "little") + data)
        return digest.hexdigest()

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be rendered."""
        return bool(self._wrapped.chat_template)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with the special tokens that the tokenizer puts around it."""
        ids: list[int] = self.backend.encode(text).ids
        return ids

    def apply_chat_template(self, messages: list[dict[str, str]]) -> list[int]:
        """The ids of a conversation (`role`, `content`), up to where the model answers.

        Raises:
            InvalidRequestError: the model has no chat template, or it refuses the messages.
        """
        return self.encode_rendered(self.render(messages))

    def render(self, messages: list[dict[str, str]]) -> str:
        """The text of a conversation (`role`, `content`), up to where the model answers.

        Raises:
            InvalidRequestError: the model has no chat template, or it refuses the messages.
        """
        if not self.has_chat_template:
            raise InvalidRequestError("the model has no chat template; send a text prompt instead")
        from jinja2 import TemplateError

        try:
            rendered: str = self._wrapped.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
        except (TemplateError, ValueError, TypeError) as error:
            raise InvalidRequestError(f"the chat template refuses the messages: {error}") from error
        return rendered

    def encode_rendered(self, rendered: str) -> list[int]:
        """The ids of a text of the chat template, which writes the special tokens itself."""
        ids: list[int] = self.backend.encode(rendered, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, without special tokens."""
        text: str = self.backend.decode(list(ids), skip_special_tokens=True)
        return text


def load_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of a transformers directory, a .gguf file or a directory with one in it.

    Raises:
        ConfigError: there is none, or it has no fast implementation.
    """
    directory, gguf_file = _locate(Path(path))
    from transformers import AutoTokenizer

    options = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        wrapped = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, **options)
    except Exception as error:  # transformers and what it calls raise almost any kind
        raise ConfigError(f"can't read the tokenizer of {path}: {error}") from error
    if not getattr(wrapped, "is_fast", False):
        raise ConfigError(f"the tokenizer of {path} has no tokenizer.json; convert it first")
    return Tokenizer(path, wrapped)


def producible_ids(tokenizer: Tokenizer, model_rows: int) -> int:
    """How many ids can come out: those with a token and a row of the model's embedding."""
    return min(tokenizer.vocab_size, model_rows)


def check_pair(target: Tokenizer, drafter: Tokenizer, producible: int | None = None) -> None:
    """Check that both mean the same by every id, or by the first `producible` ids.

    Ids from `producible` on (see `producible_ids`) never come out of the target: padding of
    the embeddings, or tokens that were added without a row for them. They may differ.

    Raises:
        TokenizerMismatchError: they do not; the message names the first id that differs.
    """
    ours, theirs = target.tokens, drafter.tokens
    if ours == theirs:
        return
    differing = (i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
    first = min(differing)
    if producible is not None and first >= producible:
        return
    raise TokenizerMismatchError(
        f"the drafter's tokenizer is not the target's: id {first} is {_shown(ours, first)} in "
        f"{target.name} and {_shown(theirs, first)} in {drafter.name}; "
        "choose a draft model with the target's tokenizer, or the ngram drafter"
    )


def _shown(tokens: dict[int, str], token_id: int) -> str:
    return repr(tokens[token_id]) if token_id in tokens else "no token"


def _locate(path: Path) -> tuple[Path, str]:
    """The directory to read, and the GGUF file in it if the tokenizer is there."""
    if path.is_file() and path.suffix == ".gguf":
        return path.parent, path.name
    if not path.is_dir():
        raise ConfigError(f"no model at {path}: it is neither a directory nor a .gguf file")
    if any((path / name).is_file() for name in _TOKENIZER_FILES):
        return path, ""
    files = sorted(path.glob("*.gguf"))
    if len(files) != 1:
        raise ConfigError(f"no tokenizer in {path}: there is no tokenizer.json")
    return path, files[0].name
