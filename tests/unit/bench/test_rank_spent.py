from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench.rank_overlap import PARTS, Timeline
from bench.rank_spent import Arrivals, Collective, Spent
from bench.tensor_parallel import parts_of, ranks_to_compare
from bench.tiny import write_model
from outrider.errors import UnsupportedModelError
from outrider.model.parallel.group import Limits, RankGroup


@pytest.mark.parametrize(
    ("others_s", "waited_s", "summed_s"),
    [([9.0], 0.0, 4.0), ([11.0], 1.0, 3.0), ([9.0, 13.0], 3.0, 1.0), ([15.0], 4.0, 0.0)],
    ids=["rank 0 is last", "the other is", "one of two is", "noted after it"],
)
def test_the_last_to_come_begins_the_sum(
    others_s: list[float], waited_s: float, summed_s: float
) -> None:
    assert Collective.of(10.0, 14.0, others_s) == Collective(waited_s, summed_s)


def test_the_same_collective_of_two_ranks_is_found_by_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0
    monkeypatch.setattr("bench.rank_spent.time.perf_counter", lambda: now_s)
    monkeypatch.setattr(RankGroup, "_wait", lambda _, start: start())
    arrivals = Arrivals(2)
    spent = Spent(arrivals)
    waits = [arrivals.watched(spent.note_left), arrivals.watched()]
    groups = [RankGroup(rank, 2, None, None, torch.device("cpu"), Limits()) for rank in (0, 1)]

    def sum_at(come_s: tuple[float, float], end_s: float) -> None:
        nonlocal now_s

        def both_there() -> None:
            nonlocal now_s
            now_s = end_s

        now_s = come_s[1]
        waits[1](groups[1], both_there)
        now_s = come_s[0]
        waits[0](groups[0], both_there)

    sum_at((1.0, 3.0), 4.0)
    spent.clear()
    sum_at((5.0, 7.0), 10.0)
    sum_at((12.0, 11.0), 13.0)
    assert spent.collectives() == [Collective(2.0, 3.0), Collective(0.0, 1.0)]


class Member:
    """Stands for one rank's part: it computes, sums, computes, sums, computes."""

    def __init__(self, pass_s: Callable[[float], None], wait: Callable[[], None]) -> None:
        self._pass_s, self._wait = pass_s, wait

    def run(self, _: Any) -> str:
        for seconds in (1.0, 2.0):
            self._pass_s(seconds)
            self._wait()
        self._pass_s(4.0)
        return "answer"


def test_own_compute_is_what_is_run_outside_of_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    def pass_s(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr("bench.rank_spent.time.perf_counter", lambda: now_s)
    monkeypatch.setattr(RankGroup, "_wait", lambda _, start: start())
    spent = Spent(Arrivals(1))
    wait = spent.arrivals.watched(spent.note_left)
    group = RankGroup(0, 1, None, None, torch.device("cpu"), Limits())
    member: Any = Member(pass_s, lambda: wait(group, lambda: pass_s(100.0)))
    spent.watch_runs(member)
    for _ in range(2):
        spent.clear()
        assert member.run(None) == "answer"
        pass_s(50.0)
        assert (spent.computed_s, spent.ran_s) == (7.0, 207.0)


def test_another_rank_s_decode_is_no_part_of_a_step() -> None:
    turn = {
        "step": 100.0,
        "model": 90.0,
        "compute": 57.0,
        "encode": 1.0,
        "send": 2.0,
        "decode": 7.0,
        "waiting": 20.0,
        "summing": 10.0,
    }
    parts = parts_of([turn])
    assert sum(seconds for (seconds,) in parts.values()) == 100.0


def test_a_timeline_gives_each_part_from_one_answer_to_the_next() -> None:
    timeline = Timeline()
    names = list(PARTS)
    rounds = 14
    for number in range(rounds):
        for place, name in enumerate(names):
            # Each part takes as long as its number; a step takes 28.
            timeline.marks.append((name, 28.0 * number + sum(range(1, place + 2))))
    steps = timeline.steps()
    assert steps
    expected: dict[str, Any] = {name: place + 1.0 for place, name in enumerate(names)}
    assert all(step == expected for step in steps)


def test_ranks_to_compare_are_those_that_the_model_can_be_split_over(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = str(write_model(tmp_path_factory.mktemp("model"), letters=24))
    assert ranks_to_compare(path, 0) == 2
    assert ranks_to_compare(path, 4) == 4
    with pytest.raises(UnsupportedModelError, match="4 heads, 2 KV heads"):
        ranks_to_compare(path, 3)
