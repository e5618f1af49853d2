"""Text from token ids as they come, never splitting a character.

The texts that `push` gives, and the last one that `flush` gives, join to exactly what
decoding all the ids at once gives, special tokens skipped. (`tokenizers.DecodeStream` keeps
neither promise: it has no flush, and with byte-fallback vocabularies it gives out characters
of a run of bytes that decoding at once shows as U+FFFD.)

Only the last few tokens are decoded again for each new one, so the cost of a token does not
depend on how many came before.
"""

import re
from functools import cached_property

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
# How many tokens are decoded together before the oldest are let go, and how many stay. A
# character is at most 4 tokens long, so what stays always holds the last one whole.
WINDOW_TOKENS = 48
CONTEXT_TOKENS = 16

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class Vocabulary:
    """What a detokenizer needs to know about a tokenizer; shared by all sessions."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend = backend

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that have no text."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """Tokens that stand for one byte each and make text only together (byte fallback)."""
        tokens = self.backend.get_vocab(with_added_tokens=False)
        ids = frozenset(i for token, i in tokens.items() if _BYTE_TOKEN.fullmatch(token))
        # Without byte fallback in the decoder such tokens are ordinary text.
        falls_back = ids and not _BYTE_TOKEN.search(self.backend.decode([min(ids)]))
        return ids if falls_back else frozenset()

    def has_text(self, token_id: int) -> bool:
        """Whether decoding looks at the token at all."""
        return token_id not in self.special_ids and self.backend.id_to_token(token_id) is not None


class Detokenizer:
    """The text of one completion."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._window: list[int] = []
        # Characters of the window's text that were given out already.
        self._given = 0

    def push(self, token_id: int) -> str:
        """The text that the token made certain; it may be empty."""
        if not self._vocabulary.has_text(token_id):
            return ""
        self._window.append(token_id)
        if token_id in self._vocabulary.byte_ids:
            # Whether a run of bytes is text is only known where the run ends.
            return ""
        text = self._decode(self._window)
        certain = _certain_chars(text)
        piece = text[self._given : certain]
        self._given = max(certain, self._given)
        if len(self._window) > WINDOW_TOKENS:
            self._let_go(len(text) - certain)
        return piece

    def flush(self) -> str:
        """The text that was still held back; nothing may be pushed after it."""
        text = self._decode(self._window)[self._given :]
        self._window, self._given = [], 0
        return text

    def _let_go(self, held: int) -> None:
        """Forget the oldest tokens where the rest alone decodes to the same end."""
        kept = self._window[-CONTEXT_TOKENS:]
        text = self._decode(kept)
        given = _certain_chars(text)
        if given and len(text) - given == held:
            self._window, self._given = kept, given

    def _decode(self, token_ids: list[int]) -> str:
        return self._vocabulary.backend.decode(token_ids, skip_special_tokens=True)


def _certain_chars(text: str) -> int:
    """All but a last U+FFFD, which may be the first bytes of a character."""
    return len(text) - 1 if text.endswith(REPLACEMENT) else len(text)
