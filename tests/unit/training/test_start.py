"""What a network begins with."""

from typing import Any

import numpy as np
import pytest
import torch

from outrider.errors import ConfigError
from outrider.model.loading import LoadedModel
from outrider.training import start
from outrider.training.corpus import Example
from outrider.training.network import DraftNetwork


def test_the_most_frequent_ids_make_the_head() -> None:
    states = np.zeros((4, 2), np.float16)
    examples = [Example(0, (9, 4, 4, 7, 4), 1, states), Example(1, (9, 7, 2, 2, 2), 1, states)]
    assert start.frequent_ids(examples, 2, 100) == [2, 4]
    # Prompts don't count; the head is filled up, and never wider than the vocabulary.
    assert start.frequent_ids(examples, 5, 100) == [0, 1, 2, 4, 7]
    assert start.frequent_ids(examples, 500, 10) == list(range(10))


def test_least_squares_guesses_what_is_linear(network: DraftNetwork) -> None:
    size = network.shape.target_hidden
    generator = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(size, size, generator=generator))[0]
    state = torch.randn(size, generator=generator)
    state = state / state.square().mean().sqrt()
    states = [state]
    for _ in range(2000):
        states.append(states[-1] @ turn)
    rows = torch.stack(states).half().numpy()
    example = Example(0, tuple(i % 200 for i in range(len(rows) + 1)), 1, rows)
    start.least_squares(network, [example], torch.ones(size))
    with torch.inference_mode():
        ids = torch.tensor([example.answer[:50]])
        hidden = torch.from_numpy(rows[:50]).float()[None]
        guessed = network.inputs(ids, hidden)[0]
    error = (guessed - torch.from_numpy(rows[1:51]).float()).square().mean()
    assert error < 0.05


def test_layers_of_the_target_are_copied(target: LoadedModel) -> None:
    module: Any = target.module
    shape = start.shape_of(module.config, layers=1, reads_hidden=False)
    network = DraftNetwork(shape, torch.zeros(4, 32), torch.zeros(4, 32))
    layer = module.model.layers[1]
    start.copy_layers(network, [layer])
    torch.testing.assert_close(network.stack[0].mlp.up_proj.weight, layer.mlp.up_proj.weight)


def test_layers_of_another_size_are_refused(target: LoadedModel) -> None:
    module: Any = target.module
    shape = start.shape_from(
        {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
         "num_hidden_layers": 1},
        start.shape_of(module.config, layers=1, reads_hidden=False),
    )  # fmt: skip
    network = DraftNetwork(shape, torch.zeros(4, 32), torch.zeros(4, 32))
    with pytest.raises(ConfigError, match="--start scratch"):
        start.copy_layers(network, list(module.model.layers)[:1])


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"hidden_size": 32, "num_attention_heads": 2}, "lacks intermediate_size"),
        (
            {"hidden_size": 64, "intermediate_size": 8, "num_attention_heads": 2,
             "num_hidden_layers": 1},
            "hidden size of 32",
        ),
    ],
)  # fmt: skip
def test_a_config_that_does_not_fit_is_refused(
    target: LoadedModel, config: dict[str, Any], why: str
) -> None:
    shape = start.shape_of(target.module.config, layers=1, reads_hidden=False)
    with pytest.raises(ConfigError, match=why):
        start.shape_from(config, shape)
