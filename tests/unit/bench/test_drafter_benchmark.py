"""What is accepted of drafters and what their tokens cost: the arithmetic, and a run of all."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import draft_cost, drafter
from bench.answers import Said
from bench.drafters import RANDOM, choose, choose_all
from bench.replay import replay
from outrider.cli.models import LOOKUP
from outrider.drafting.ngram import NgramDrafter
from outrider.errors import ConfigError
from outrider.figures import SpeculationFigures
from outrider.messages import Tensor
from outrider.model.embedded import EMBEDDED_MODEL
from outrider.model.shipped import SHIPPED_DRAFT
from tests.support.draft_networks import save_draft_network
from tests.support.models import perturbed, save_model


def figures(*rounds: tuple[int, int]) -> SpeculationFigures:
    found = SpeculationFigures()
    for drafted, accepted in rounds:
        found.add_round(drafted, accepted)
    return found


def test_the_step_of_the_prompt_is_no_round() -> None:
    # Two texts: a plain first step each, then 3 + 1 and 1 tokens.
    of = figures((0, 0), (4, 3), (0, 0), (4, 0), (4, 0))
    assert drafter.mean_length(of, 2) == 2.0
    assert drafter.mean_length(figures((0, 0)), 1) == 1.0


def test_by_position_only_drafts_that_were_right_so_far_count() -> None:
    of = figures((0, 0), (4, 4), (4, 2), (2, 2), (4, 0))
    assert drafter.by_position(of, 4) == [0.75, 1.0, pytest.approx(1 / 3), 1.0]
    assert drafter.by_position(figures((0, 0)), 2) == [0.0, 0.0]


def test_bars_are_about_all_answers() -> None:
    good, bad = figures((0, 0), (4, 4)), figures((0, 0), (4, 0), (4, 0))
    report = drafter.acceptance_report({"d": [good, bad]}, ["x", "y"], 4)
    assert report.rows == [["x", 1, "5.00"], ["y", 1, "1.00"], ["all", 2, "2.33"]]
    assert [bar.met for bar in report.bars] == [True]
    report = drafter.acceptance_report({"d": [bad, bad]}, ["x", "y"], 4)
    assert [bar.met for bar in report.bars] == [False]


def test_a_draft_model_is_taken_with_each_drafter_that_runs_one() -> None:
    chosen = choose_all(("ngram", "model", "hybrid"), ("/x/a", "/x/b"), "/t")
    names = [choice.name for choice in chosen]
    assert names == ["ngram", "model a", "model b", "hybrid a", "hybrid b"]
    for kinds, draft_models in [(("model",), ()), (("ngram",), ("/x/a",))]:
        with pytest.raises(ConfigError, match="--draft-model"):
            choose_all(kinds, draft_models, "/t")
    with pytest.raises(ConfigError, match="two drafters"):
        choose_all(("model",), ("/x/a", "/y/a"), "/t")
    with pytest.raises(ConfigError, match="no use"):
        choose(RANDOM, "/x/a", "/t")
    # As in `outrider up`: the embedded model has a draft model, others are looked up for.
    (one,) = choose_all(("auto", "hybrid"), (), EMBEDDED_MODEL)
    assert one.name == f"hybrid {SHIPPED_DRAFT}"
    assert [choice.drafter for choice in choose_all(("auto",), (), "/t")] == [LOOKUP]


class Reads:
    """A drafter that reads hidden states and keeps what it is told."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.told: list[tuple[int, tuple[int, ...], Tensor]] = []
        self._drafter = NgramDrafter()

    @property
    def reads(self) -> "Reads":
        return self

    def commit(self, session_id: str, base_len: int, token_ids: Any, hidden: Tensor) -> None:
        self.told.append((base_len, tuple(token_ids), hidden))
        self._drafter.commit(session_id, base_len, token_ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)


def test_a_drafter_that_reads_hidden_states_gets_those_of_each_token() -> None:
    import numpy as np

    states = np.arange(12, dtype=np.float16).reshape(6, 2)
    reading: Any = Reads(2)
    replay(reading, [Said("x", [1, 2, 3, 1], [2, 3, 1, 2, 3, 9], states)], 2)
    assert [tokens for _, tokens, _ in reading.told] == [(2,), (3, 1, 2), (3, 9)]
    told = b"".join(hidden.data for _, _, hidden in reading.told)
    assert told == states.tobytes()
    assert reading.told[1][2].shape == (3, 2)


def test_a_token_is_a_share_of_a_proposal() -> None:
    reading: Any = Reads(8)
    follower = draft_cost.Follower(reading, [1, 2] * 20, 10, 4)
    assert 0 < follower() < 1
    follower()
    assert [base for base, _, _ in reading.told] == [10, 12]
    assert all(hidden.shape == (2, 8) for _, _, hidden in reading.told)
    report = draft_cost.report_of({"d": draft_cost.Cost([1.0, 2.0], [0.5, 0.5])}, "T")
    assert report.figures["d"]["over_step"]["median"] == 0.375
    with pytest.raises(ConfigError, match="--context"):
        draft_cost.text_tokens(100, 10, 100)


def test_drafters_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = save_model(tmp_path / "target")
    same = perturbed(target, tmp_path / "same", noise=0.0)
    trained = save_draft_network(tmp_path / "trained", target)
    settings = drafter.Settings(
        model=str(target),
        drafter=("ngram", "model"),
        draft_model=(str(same), str(trained)),
        count=3,
        context=64,
        new_tokens=10,
        rounds=2,
        threads=1,
        cache=str(tmp_path / "cache"),
        bar=True,
    )
    with pytest.raises(SystemExit):  # a draft model that is the target itself is not cheap
        drafter.run(settings)
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    accepted = printed["figures"]["acceptance"]["all"]
    assert accepted["answers"] == 3
    assert accepted["model same"]["acceptance_rate"] == 1.0
    # One of random weights that reads hidden states.
    assert accepted["model trained"]["draft_tokens_a_round"] > 1
    assert printed["figures"]["by_position"]["model same"][0] == 1.0
    assert printed["figures"]["cost"]["ngram"]["over_step"]["count"] == 2
    assert printed["bars"]["model same: mean acceptance length of 2 at least"]
    assert not printed["bars"]["model same: a token costs at most 0.06 of a step"]
