"""Where texts come from: prompts of the user, text files, or prompts of the target's own."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from outrider.errors import ConfigError
from outrider.model.blocks import BlockTable
from outrider.model.paged import PagedModel, Segment
from outrider.model.tokenizers import Tokenizer
from outrider.training.corpus import Example
from outrider.training.prompts import answered, invented
from outrider.training.writing import Script

# A window of a text file, in tokens; what comes before it is not seen.
WINDOW = 256


@dataclass(frozen=True, slots=True)
class Source:
    """One of the three: files of prompts, files of text, or neither."""

    prompts: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.prompts and self.texts:
            raise ConfigError("--prompts and --text exclude each other; train on one after another")

    @property
    def name(self) -> str:
        """For people, and to tell corpora apart."""
        if self.prompts:
            return "answers to " + ", ".join(Path(path).name for path in self.prompts)
        if self.texts:
            return "text of " + ", ".join(Path(path).name for path in self.texts)
        return "answers to prompts that the target invented"


def scripts(
    source: Source,
    tokenizer: Tokenizer,
    *,
    known: set[int],
    count: int,
    seed: int,
    max_tokens: int,
    most_prompt: int,
    stop_ids: frozenset[int],
) -> Iterator[Script]:
    """The scripts of the first `count` texts, less those that are `known`.

    Raises:
        ConfigError: a file can't be read, or prompts are to be invented by a model without a
            chat template.
    """
    if source.prompts:
        prompts = [ids[-most_prompt:] for ids in read_prompts(source.prompts, tokenizer)]
        for index, prompt in enumerate(prompts[:count]):
            if index not in known:
                yield answered(index, prompt, max_tokens=max_tokens, stop_ids=stop_ids)
        return
    if not tokenizer.has_chat_template:
        raise ConfigError(
            "the target has no chat template, so it can't invent prompts; give some with "
            "--prompts, or text with --text"
        )
    for index in range(count):
        if index not in known:
            yield invented(index, tokenizer, seed=seed, max_tokens=max_tokens, stop_ids=stop_ids)


def read_prompts(paths: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """The prompts of files: a line each, or JSON lines with `prompt`, `turns` or `messages`.

    Raises:
        ConfigError: a file can't be read, or a line is none of these.
    """
    found = []
    for path in paths:
        for number, line in enumerate(_lines(path), 1):
            if not line.strip():
                continue
            messages = _messages(line) if path.endswith(".jsonl") else _user(line)
            if messages is None:
                raise ConfigError(
                    f"{path}:{number} is no JSON object with prompt, turns or messages"
                )
            if tokenizer.has_chat_template:
                found.append(tokenizer.apply_chat_template(messages))
            else:
                found.append(tokenizer.encode(messages[-1]["content"]))
    return found


def windows(
    source: Source, tokenizer: Tokenizer, model: PagedModel, *, known: set[int], count: int
) -> Iterator[Example]:
    """The first `count` windows of text files, with the states that the target has there."""
    index = -1
    for path in source.texts:
        ids = tokenizer.encode("".join(_lines(path)))
        for begin in range(0, len(ids) - 1, WINDOW):
            window = ids[begin : begin + WINDOW]
            index += 1
            if index >= count:
                return
            if index in known or len(window) < 2:
                continue
            table = BlockTable()
            model.pool.grow(table, len(window) - 1)
            output = model.step([Segment(window[:-1], table, len(window) - 1)])
            hidden = output.hidden.to("cpu").half().numpy()
            model.pool.release(table, keep=False)
            yield Example(index, tuple(window), 1, np.array(hidden))


def _lines(path: str) -> Iterable[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read {path}: {error}") from error


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text.strip()}]


def _messages(line: str) -> list[dict[str, str]] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    match value:
        case {"messages": [{"role": str(), "content": str()}, *_] as messages}:
            return [{"role": str(m["role"]), "content": str(m["content"])} for m in messages]
        case {"prompt": str(prompt)} | {"turns": [str(prompt), *_]}:
            return _user(prompt)
        case _:
            return None
