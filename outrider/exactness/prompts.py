"""What a system is asked when its exactness is checked."""

import json
from pathlib import Path

from outrider.errors import ConfigError
from outrider.model.tokenizers import Tokenizer

# Text that repeats itself, which lookup drafts well, and text that does not.
TEXTS = (
    "Repeat the following text word for word. The keeper climbed the narrow stairs, lit the "
    "great lamp, and watched the boats come home. When the fog was thick, he rang the bell.",
    "Explain in plain words why the sky is blue and why sunsets are red.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "List the months of the year, one a line, and after each its number of days.",
    "Describe a market in a harbour town on a rainy morning.",
    "A shop sells pens at 3 for 2 euros. How much do 21 pens cost? Show the steps.",
    "Count from one to twenty in words, then count back down to one.",
    "What is the difference between weather and climate? Give an example of each.",
)
# The start of the completions whose law is tested; short, and made to be looked up.
LAW_TEXT = "1 2 1 2"


def read_texts(path: str | None, count: int) -> list[str]:
    """The first `count` texts of a file, or of our own.

    A line of the file is a text, or a JSON object with `prompt`, or with `turns` as in
    Spec-Bench, of which the first counts.

    Raises:
        ConfigError: there is no such file, or a line can't be read.
    """
    if path is None:
        return list(TEXTS[:count])
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read the prompts at {path}: {error}") from error
    texts = [_text_of(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]
    kept = [text for text in texts if text][:count]
    if not kept:
        raise ConfigError(f"there is no prompt in {path}")
    return kept


def _text_of(line: str, where: str) -> str:
    if not line.startswith("{"):
        return line.strip()
    try:
        record = json.loads(line)
        text = record["prompt"] if "prompt" in record else record["turns"][0]
    except (json.JSONDecodeError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"{where}: neither a text nor JSON with prompt or turns") from error
    return str(text)


def encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """A user's message where the model has a chat template, else the text as it is."""
    if tokenizer.has_chat_template:
        return tuple(tokenizer.apply_chat_template([{"role": "user", "content": text}]))
    return encode_plain(tokenizer, text)


def encode_plain(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """The text as it is; the first ids where the tokenizer knows none of it."""
    return tuple(tokenizer.encode(text)) or tuple(range(min(4, tokenizer.vocab_size)))
