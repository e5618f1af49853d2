"""Sessions at once by draft length: bars from made-up rates, and the plot."""

from pathlib import Path

import pytest

from bench import sweep
from bench.sweep import OFF, Point, Settings, of_round, report_of
from bench.turns import Turn
from outrider.draft_length import AUTO
from outrider.errors import ConfigError


def point(sessions: int, auto: list[float], text: tuple[int, ...] = (1,)) -> Point:
    rates = {OFF: [1.0, 10.0, 1.0], "k = 2": [2.0, 20.0, 2.0], AUTO: auto}
    said = {OFF: [Turn((1,), 1.0)], "k = 2": [Turn((1,), 1.0)], AUTO: [Turn(text, 1.0)]}
    return Point(sessions, rates, said)


def test_the_chosen_length_is_held_against_the_best_of_the_others() -> None:
    good = point(1, [1.95, 19.0, 2.2])
    assert good.best == "k = 2"
    assert good.over_best.median == pytest.approx(0.975)
    bad = point(2, [1.9, 19.0, 9.0], text=(2,))
    report = report_of([good, bad], "d")
    assert [bar.met for bar in report.bars] == [True, False, False]
    assert report.figures["1"]["differences"] == {}
    assert report.figures["2"]["differences"] == {
        AUTO: [{"prompt": 0, "at": 0, "token_ids": [2, 1]}]
    }


def test_no_prompt_is_there_twice_in_a_round() -> None:
    prompts = [[n] for n in range(5)]
    assert [of_round(prompts, 2, number) for number in range(3)] == [
        [[0], [1]],
        [[2], [3]],
        [[4], [0]],
    ]


def test_a_plot(tmp_path: Path) -> None:
    where = tmp_path / "sweep.png"
    sweep.draw(where, [point(1, [1.0, 1.0, 1.0]), point(2, [1.0, 2.0, 3.0])], "T")
    assert where.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="--plot"):
        Settings(plot=str(tmp_path / "nowhere" / "sweep.png"))
