"""A run learns, and one that was ended goes on as if it had not been."""

from pathlib import Path

import pytest
import torch

from outrider.errors import ConfigError
from outrider.training.corpus import Example
from outrider.training.network import DraftNetwork
from outrider.training.run import Plan, Run
from outrider.training.start import positions_of
from tests.support.models import TOKENS, VOCABULARY

PLAN = Plan(steps=12, batch_tokens=30, warmup=2, unroll=2, look_every=4, rate=3e-3)


def start(network: DraftNetwork, directory: Path, plan: Plan = PLAN) -> Run:
    directory.mkdir(exist_ok=True)
    ids = positions_of(range(0, TOKENS, 2), VOCABULARY)
    norm = torch.ones(network.shape.target_hidden)
    return Run(network, plan, directory, draft_ids=ids, norm_weight=norm)


def copy_of(network: DraftNetwork) -> DraftNetwork:
    copied = DraftNetwork(network.shape, network.embeddings, network.head)
    copied.load_state_dict(network.state_dict())
    return copied


def test_the_loss_falls(network: DraftNetwork, examples: list[Example], tmp_path: Path) -> None:
    plan = Plan(steps=40, batch_tokens=200, warmup=2, unroll=2, look_every=40, rate=3e-3)
    run = start(network, tmp_path, plan)
    run.train(examples, examples)
    losses = run.history.losses
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


def test_an_ended_run_goes_on_where_it_was(
    network: DraftNetwork, examples: list[Example], tmp_path: Path
) -> None:
    whole = copy_of(network)
    uninterrupted = start(whole, tmp_path / "whole")
    uninterrupted.train(examples, examples)

    def end(glance: object) -> None:
        if getattr(glance, "step", 0) == 6:
            raise KeyboardInterrupt

    first = copy_of(network)
    with pytest.raises(KeyboardInterrupt):
        start(first, tmp_path / "ended").train(examples, examples, end)
    second = copy_of(network)
    resumed = start(second, tmp_path / "ended")
    assert resumed.resume()
    resumed.train(examples, examples)
    assert resumed.history == uninterrupted.history
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(second.state_dict()[name], tensor, atol=0, rtol=0)


def test_a_checkpoint_of_other_settings_is_refused(
    network: DraftNetwork, examples: list[Example], tmp_path: Path
) -> None:
    start(copy_of(network), tmp_path).train(examples, examples)
    other = start(network, tmp_path, Plan(steps=12, batch_tokens=30, rate=1e-2))
    with pytest.raises(ConfigError, match="other settings"):
        other.resume()


def test_nothing_to_learn_from_is_an_error(network: DraftNetwork, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too few texts"):
        start(network, tmp_path).train([], [])
