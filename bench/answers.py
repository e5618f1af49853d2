"""What the target answers to prompts, greedily and without drafts; written once and kept."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.report import progress
from outrider.model.loading import LoadedModel
from outrider.model.numerics import FAST, choose_numerics
from outrider.model.paged import PagedModel
from outrider.training.corpus import Corpus, Example
from outrider.training.prompts import answered
from outrider.training.writing import Writer, blocks_needed

_TOLD_EVERY = 10


@dataclass(frozen=True, slots=True)
class Said:
    """A prompt and what the target said, greedily.

    `hidden` float16 [tokens, hidden]: what the target's head made each of the tokens of.
    """

    category: str
    prompt: list[int]
    tokens: list[int]
    hidden: npt.NDArray[np.float16] | None = None


def plain_greedy(
    model: LoadedModel,
    prompts: Sequence[tuple[str, list[int]]],
    *,
    new_tokens: int,
    token_count: int,
    at_once: int = 8,
    keep: Path | None = None,
) -> list[Said]:
    """What the target says after each (category, prompt), some prompts at a time.

    In `keep` answers are kept, by target and prompts: a run that was ended goes on from there.
    """
    ids = [prompt for _, prompt in prompts]
    if keep is None:
        examples = _write(model, ids, new_tokens, token_count, at_once, known=set())
    else:
        about = {
            "target": model.fingerprint,
            "prompts": hashlib.sha256(json.dumps(ids).encode()).hexdigest(),
            "new_tokens": new_tokens,
        }
        name = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
        hidden_size: int = model.module.config.get_text_config().hidden_size
        corpus = Corpus.open(keep / name, hidden_size, about)
        known = {example.index for example in corpus}
        _write(model, ids, new_tokens, token_count, at_once, known=known, corpus=corpus)
        examples = {example.index: example for example in corpus}
    return [
        Said(category, prompt, list(examples[number].answer), examples[number].hidden)
        for number, (category, prompt) in enumerate(prompts)
    ]


def _write(
    model: LoadedModel,
    prompts: Sequence[list[int]],
    new_tokens: int,
    token_count: int,
    at_once: int,
    *,
    known: set[int],
    corpus: Corpus | None = None,
) -> dict[int, Example]:
    """The answers to all prompts but the `known` ones, by number; into a `corpus`, too."""
    missing = [number for number in range(len(prompts)) if number not in known]
    if not missing:
        return {}
    blocks = blocks_needed(at_once, max(len(prompts[number]) for number in missing) + new_tokens)
    paged = PagedModel(model, blocks, choose_numerics(FAST, model))
    scripts = (
        answered(number, prompts[number], max_tokens=new_tokens, stop_ids=model.stop_ids)
        for number in missing
    )
    examples: dict[int, Example] = {}
    for example in Writer(paged, token_count, seats=at_once).run(scripts):
        examples[example.index] = example
        if corpus is not None:
            corpus.add(example)
        if len(examples) % _TOLD_EVERY == 0 or len(examples) == len(missing):
            progress(f"{len(examples)} of {len(missing)} answers of the target")
    return examples
