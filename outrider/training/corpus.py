"""Texts to learn from, kept in a directory that grows while they are written.

    index.jsonl   a line a text: [index, prompt tokens, [token ids]]
    hidden.bin    for each answer token the hidden state that it was made of, float16, in order
    about.json    what wrote them: a run goes on only with texts of the same making

A text counts once its line is whole, so that a run can be ended at any time and goes on later.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from outrider.errors import ConfigError

INDEX, HIDDEN, ABOUT = "index.jsonl", "hidden.bin", "about.json"


@dataclass(frozen=True, slots=True)
class Example:
    """A text to learn from; its tokens from `prompt_len` on are the target's own.

    `hidden` float16 [tokens - prompt_len, hidden]: what the target's head made each of them of.
    """

    index: int
    token_ids: tuple[int, ...]
    prompt_len: int
    hidden: npt.NDArray[np.float16]

    @property
    def prompt(self) -> tuple[int, ...]:
        """The tokens that were given."""
        return self.token_ids[: self.prompt_len]

    @property
    def answer(self) -> tuple[int, ...]:
        """The tokens that the target wrote."""
        return self.token_ids[self.prompt_len :]


def digest_of(examples: Iterable[Example]) -> str:
    """SHA-256 of what the texts say, in their order; two trainings can be compared by it."""
    digest = hashlib.sha256()
    for example in examples:
        line = [example.index, example.prompt_len, list(example.token_ids)]
        digest.update(json.dumps(line).encode())
    return digest.hexdigest()


class Corpus:
    """A directory of texts; one process adds to it at a time."""

    def __init__(self, directory: Path, hidden_size: int) -> None:
        self._directory = directory
        self._hidden_size = hidden_size

    @classmethod
    def open(cls, directory: Path, hidden_size: int, about: dict[str, Any]) -> Self:
        """Begin a corpus, or go on with one that was made the same way.

        Raises:
            ConfigError: what is there was made another way; the message names the difference.
        """
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / ABOUT
        if path.exists():
            known = json.loads(path.read_text())
            for name in {*known, *about}:
                if known.get(name) != about.get(name):
                    raise ConfigError(
                        f"the texts in {directory} were written with {name} "
                        f"{known.get(name)!r}, not {about.get(name)!r}; name another directory "
                        "with --texts"
                    )
        path.write_text(json.dumps(about, indent=2, sort_keys=True) + "\n")
        corpus = cls(directory, hidden_size)
        corpus._cut()
        return corpus

    def __iter__(self) -> Iterator[Example]:
        """The texts, in the order in which they were written; states are read when looked at."""
        index, hidden = self._directory / INDEX, self._directory / HIDDEN
        if not index.exists() or not hidden.stat().st_size:
            return
        states = np.memmap(hidden, np.float16, "r").reshape(-1, self._hidden_size)
        at = 0
        for line in index.read_text().splitlines():
            number, prompt_len, ids = json.loads(line)
            count = len(ids) - prompt_len
            yield Example(number, tuple(ids), prompt_len, states[at : at + count])
            at += count

    def add(self, example: Example) -> None:
        """Add a text."""
        with (self._directory / HIDDEN).open("ab") as states:
            states.write(np.ascontiguousarray(example.hidden, np.float16).tobytes())
        line = json.dumps([example.index, example.prompt_len, list(example.token_ids)])
        with (self._directory / INDEX).open("a") as index:
            index.write(line + "\n")

    def _cut(self) -> None:
        """Drop what the end of a process left of a text."""
        index, hidden = self._directory / INDEX, self._directory / HIDDEN
        index.touch()
        hidden.touch()
        text = index.read_text()
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            index.write_text(whole)
        lines = (json.loads(line) for line in whole.splitlines())
        tokens = sum(len(ids) - prompt_len for _, prompt_len, ids in lines)
        size = tokens * self._hidden_size * 2
        if hidden.stat().st_size < size:
            raise ConfigError(
                f"{hidden} lacks states of texts in {INDEX}; delete {self._directory} and begin "
                "again"
            )
        with hidden.open("r+b") as states:
            states.truncate(size)
