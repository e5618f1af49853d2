"""A long run goes on where it was ended."""

from pathlib import Path

import pytest

from bench.kept import Kept
from bench.turns import Turn
from outrider.errors import ConfigError
from outrider.figures import SpeculationFigures

ABOUT = {"target": "t", "ways": ["off", "auto"]}


def a_round(number: int) -> dict[str, Turn]:
    figures = SpeculationFigures(3, 2, 8, 5, [2, 2, 1])
    return {"off": Turn((number, 2), 1.5), "auto": Turn((number, 2), 0.5, figures)}


def test_what_came_of_each_round_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "run"
    first = Kept(path, ABOUT)
    for number in range(3):
        first.add(a_round(number))
    # Ended in the middle of a line.
    path.write_text(path.read_text()[:-7])
    second = Kept(path, ABOUT)
    assert second.rounds == [a_round(0), a_round(1)]
    second.add(a_round(2))
    assert Kept(path, ABOUT).rounds == first.rounds


def test_rounds_of_another_run_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    Kept(path, ABOUT).add(a_round(0))
    with pytest.raises(ConfigError, match="other settings"):
        Kept(path, {**ABOUT, "target": "u"})
    assert Kept(path, ABOUT).rounds == [a_round(0)]
    # Without a file nothing is kept.
    nowhere = Kept(None, ABOUT)
    nowhere.add(a_round(0))
    assert nowhere.rounds == [a_round(0)]
