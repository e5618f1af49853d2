"""A corpus goes on after any end of the process that wrote it."""

from pathlib import Path

import numpy as np
import pytest

from outrider.errors import ConfigError
from outrider.training.corpus import HIDDEN, INDEX, Corpus, Example

ABOUT = {"target": "t", "seed": 1}


def example(index: int, answer: int = 3) -> Example:
    states = np.full((answer, 4), index, np.float16)
    return Example(index, tuple(range(2 + answer)), 2, states)


def same(left: list[Example], right: list[Example]) -> bool:
    return [(e.index, e.token_ids, e.hidden.tolist()) for e in left] == [
        (e.index, e.token_ids, e.hidden.tolist()) for e in right
    ]


def test_texts_come_back(tmp_path: Path) -> None:
    corpus = Corpus.open(tmp_path, 4, ABOUT)
    assert list(corpus) == []
    written = [example(5), example(2, 1), example(9, 7)]
    for one in written:
        corpus.add(one)
    assert same(list(Corpus.open(tmp_path, 4, ABOUT)), written)
    assert list(corpus)[2].prompt == (0, 1)


@pytest.mark.parametrize("lost", ["line", "states"])
def test_half_a_text_is_dropped(tmp_path: Path, lost: str) -> None:
    corpus = Corpus.open(tmp_path, 4, ABOUT)
    corpus.add(example(1))
    if lost == "line":
        with (tmp_path / INDEX).open("a") as index:
            index.write("[2, 2, [0, 1, 2")
    with (tmp_path / HIDDEN).open("ab") as states:
        states.write(b"\0" * 11)
    corpus = Corpus.open(tmp_path, 4, ABOUT)
    corpus.add(example(3))
    assert same(list(corpus), [example(1), example(3)])


def test_texts_of_another_making_are_refused(tmp_path: Path) -> None:
    Corpus.open(tmp_path, 4, ABOUT)
    with pytest.raises(ConfigError, match="seed 1, not 2"):
        Corpus.open(tmp_path, 4, {"target": "t", "seed": 2})


def test_lost_states_are_an_error(tmp_path: Path) -> None:
    Corpus.open(tmp_path, 4, ABOUT).add(example(1))
    (tmp_path / HIDDEN).write_bytes(b"")
    with pytest.raises(ConfigError, match="lacks states"):
        Corpus.open(tmp_path, 4, ABOUT)
