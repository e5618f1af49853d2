"""Prompts to measure with: a few of our own, or a file in the format of Spec-Bench."""

import json
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import ConfigError
from outrider.model.tokenizers import Tokenizer

BUILT_IN = {
    "writing": [
        "Write a short story about a clockmaker who repairs a clock that runs backwards.",
        "Describe a market in a harbour town on a rainy morning.",
    ],
    "explain": [
        "Explain in plain words why the sky is blue and why sunsets are red.",
        "What is the difference between weather and climate? Give an example of each.",
    ],
    "code": [
        "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
        "Write a function in Python that reverses the words of a sentence, and explain it.",
    ],
    "arithmetic": [
        "A train travels 180 km in 2 hours and then 90 km in 1.5 hours. What is its average "
        "speed over the whole journey? Show the steps.",
        "A shop sells pens at 3 for 2 euros. How much do 21 pens cost? Show the steps.",
    ],
    "repeat": [
        "Repeat the following text word for word. The keeper climbed the narrow stairs, lit the "
        "great lamp, and watched the boats come home. When the fog was thick, he rang the bell.",
        "Rewrite this sentence with every name replaced by 'Sam': Anna met Peter at the station, "
        "and Peter told Anna that the train to Lyon would leave at noon.",
    ],
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text and its category."""

    category: str
    text: str


def encode(tokenizer: Tokenizer, text: str, most_tokens: int) -> list[int]:
    """The prompt as a user's message where the model has a chat template, else as it is.

    A text that is too long is cut at its end, so that the whole has `most_tokens` at most.
    """
    if not tokenizer.has_chat_template:
        return tokenizer.encode(text)[:most_tokens]

    def rendered(content: str) -> list[int]:
        return tokenizer.apply_chat_template([{"role": "user", "content": content}])

    ids = rendered(text)
    kept = tokenizer.encode(text)
    while len(ids) > most_tokens:
        kept = kept[: len(kept) - (len(ids) - most_tokens)]
        if not kept:
            raise ConfigError(f"the chat template alone takes more than {most_tokens} tokens")
        ids = rendered(tokenizer.decode(kept))
    return ids


def load_prompts(path: str | None, count: int, categories: Collection[str] = ()) -> list[Prompt]:
    """`count` prompts, taken from the categories in turn; the first turn of each question.

    `path` names a file of JSON lines with `category` and `turns`; None takes our own prompts.
    Without `categories`, of all there are.

    Raises:
        ConfigError: there is no such file or category.
    """
    by_category: dict[str, list[Prompt]] = defaultdict(list)
    if path is None:
        for category, texts in BUILT_IN.items():
            by_category[category] = [Prompt(category, text) for text in texts]
    else:
        if not Path(path).is_file():
            raise ConfigError(f"no prompts at {path}: give a file of JSON lines")
        for line in Path(path).read_text().splitlines():
            record = json.loads(line)
            by_category[record["category"]].append(Prompt(record["category"], record["turns"][0]))
    if unknown := set(categories) - by_category.keys():
        raise ConfigError(
            f"no prompts of {', '.join(sorted(unknown))}; there are {', '.join(by_category)}"
        )
    if categories:
        by_category = {name: by_category[name] for name in by_category if name in categories}
    chosen: list[Prompt] = []
    turn = 0
    while len(chosen) < count and any(len(prompts) > turn for prompts in by_category.values()):
        chosen += [prompts[turn] for prompts in by_category.values() if len(prompts) > turn]
        turn += 1
    return chosen[:count]


def prompts_of(tokenizer: Tokenizer, count: int, tokens: int, *, first: int = 0) -> list[list[int]]:
    """`count` prompts of exactly `tokens` tokens; no two begin alike, whatever `first` they had.

    What one has in common with another could come from a cache of prefixes.
    """
    texts = [text for of_category in BUILT_IN.values() for text in of_category]
    prompts = []
    for number in range(first, first + count):
        ids = tokenizer.encode(f"{number * 7919 % 100_003} {texts[number % len(texts)]}\n\n")
        for turn in range(1, tokens):
            if len(ids) >= tokens:
                break
            ids += tokenizer.encode(f"{texts[(number + turn) % len(texts)]}\n\n")
        prompts.append(ids[:tokens])
    return prompts
