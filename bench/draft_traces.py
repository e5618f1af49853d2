"""How far drafts would have been right, at every place of real completions.

Greedy text does not depend on drafts. So one pass over it tells what a draft at each of its
places would have come to, and with that every way to choose draft lengths can be played
through without a model. The recorded ones are in `draft_traces.csv`.
"""

import csv
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import ConfigError

RECORDED = Path(__file__).with_name("draft_traces.csv")
# Drafts are looked at up to this length, which is the most that a verify worker takes.
MOST = 16
COLUMNS = ("drafter", "category", "tokens", "accepted")
_DIGITS = string.digits + string.ascii_lowercase


@dataclass(frozen=True, slots=True)
class Trace:
    """One completion under one drafter, place by place.

    tokens[t]: how long a draft after t tokens of the completion would have been, of the `MOST`
    that were asked for. accepted[t]: how many of those are what the target says.
    """

    drafter: str
    category: str
    tokens: tuple[int, ...]
    accepted: tuple[int, ...]

    def draft(self, place: int, asked: int) -> tuple[int, int]:
        """Tokens of a draft there, and how many of them are accepted."""
        tokens = min(self.tokens[place], asked)
        return tokens, min(self.accepted[place], tokens)


def load_traces(path: Path = RECORDED) -> list[Trace]:
    """The traces in a file.

    Raises:
        ConfigError: it is not one that `record` wrote.
    """
    with path.open(newline="") as file:
        rows = csv.reader(file)
        if tuple(next(rows, ())) != COLUMNS:
            raise ConfigError(f"{path} has no traces: its columns are not {', '.join(COLUMNS)}")
        return [Trace(drafter, category, _read(t), _read(a)) for drafter, category, t, a in rows]


def save_traces(traces: Sequence[Trace], path: Path) -> None:
    """Write traces to a file, one digit (of base 36) a place."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(COLUMNS)
        for trace in traces:
            figures = _write(trace.tokens), _write(trace.accepted)
            rows.writerow((trace.drafter, trace.category, *figures))


def _read(digits: str) -> tuple[int, ...]:
    return tuple(int(digit, 36) for digit in digits)


def _write(figures: Sequence[int]) -> str:
    return "".join(_DIGITS[figure] for figure in figures)


def of_choices(text: Sequence[int], chosen: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Length and accepted tokens of the drafts of a model at each place of a completion.

    chosen[t] is what the model says after t tokens of `text`. As long as a draft is right,
    the model sees the text itself; so a draft is accepted up to where the two first differ.
    """
    for place in range(len(text)):
        run = 0
        while run < MOST and place + run < len(text) and chosen[place + run] == text[place + run]:
            run += 1
        yield MOST, run


def of_lookups(prompt: Sequence[int], text: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The same for prompt lookup with its default lengths."""
    from outrider.drafting.ngram import NgramIndex

    index = NgramIndex(2, 4)
    index.extend(prompt)
    for place, token in enumerate(text):
        found = index.lookup(MOST)
        run = 0
        while run < len(found) and tuple(text[place : place + run + 1]) == found[: run + 1]:
            run += 1
        yield len(found), run
        index.extend([token])


def record(model: str, cache: Path, noises: Sequence[float], new_tokens: int) -> list[Trace]:
    """Traces of prompt lookup and of weaker copies of `model`, on the built-in prompts."""
    import torch
    from transformers import AutoModelForCausalLM

    from bench.acceptance import weaker_copy
    from bench.prompts import encode, load_prompts
    from bench.reference import Reference
    from bench.report import progress
    from outrider.model.tokenizers import load_tokenizer

    reference, tokenizer = Reference(model), load_tokenizer(model)
    texts: list[tuple[str, list[int], list[int]]] = []
    for prompt in load_prompts(None, 1000):
        ids = encode(tokenizer, prompt.text, 256)
        texts.append((prompt.category, ids, reference.greedy(ids, new_tokens)))
        progress(f"{len(texts)} completions")
    traces: list[Trace] = []
    for category, ids, text in texts:
        traces.append(_trace("ngram", category, of_lookups(ids, text)))
    for noise in noises:
        path = weaker_copy(Path(model), cache, noise, 0)
        drafter = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        drafter.train(False)
        for category, ids, text in texts:
            with torch.inference_mode():
                logits = drafter(input_ids=torch.tensor([[*ids, *text[:-1]]])).logits[0]
            chosen = logits[len(ids) - 1 :].argmax(-1).tolist()
            traces.append(_trace(f"noise {noise:g}", category, of_choices(text, chosen)))
    return traces


def _trace(drafter: str, category: str, found: Iterator[tuple[int, int]]) -> Trace:
    tokens, accepted = zip(*found, strict=True)
    return Trace(drafter, category, tokens, accepted)
