"""Unrolled steps are what a drafter does one by one, and the layers are those of Llama."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaModel

from outrider.training.batches import stack
from outrider.training.corpus import Example
from outrider.training.network import DraftNetwork


def as_llama(network: DraftNetwork) -> Any:
    shape = network.shape
    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        num_hidden_layers=shape.num_hidden_layers,
        rope_theta=shape.rope_theta,
        rms_norm_eps=shape.rms_norm_eps,
        vocab_size=8,
    )
    model = LlamaModel(config)
    result = model.load_state_dict(network.state_dict(), strict=False)
    assert set(result.missing_keys) == {"embed_tokens.weight"}
    return model.eval()


@torch.inference_mode()
def drafted_states(
    network: DraftNetwork, llama: Any, example: Example, last: int, steps: int
) -> list[torch.Tensor]:
    """The states of a chain that is drafted after answer token `last`, the text being right."""
    prompt = network.inputs(torch.tensor([example.prompt]), None)
    states = torch.from_numpy(example.hidden).float()[None]
    known = network.inputs(torch.tensor([example.answer[: last + 1]]), states[:, : last + 1])
    rows, found = torch.cat([prompt, known], 1), []
    for step in range(steps):
        state = llama(inputs_embeds=rows).last_hidden_state[:, -1:]
        found.append(state[0, 0])
        following = example.answer[last + 1 + step] if last + 1 + step < 14 else 0
        rows = torch.cat([rows, network.inputs(torch.tensor([[following]]), state)], 1)
    return found


@pytest.mark.parametrize("last", [0, 3, 9])
def test_unrolled_steps_are_those_of_a_drafter(
    network: DraftNetwork, examples: list[Example], last: int
) -> None:
    llama = as_llama(network)
    with torch.inference_mode():
        steps = network.unroll(stack(examples, 100), 4)
    for row, example in enumerate(examples):
        expected = drafted_states(network, llama, example, last, 4)
        for ahead, state in enumerate(expected):
            torch.testing.assert_close(steps[ahead][row, last + ahead], state, atol=1e-4, rtol=1e-4)


def test_a_text_does_not_depend_on_its_neighbours(
    network: DraftNetwork, examples: list[Example]
) -> None:
    with torch.inference_mode():
        together = network.unroll(stack(examples, 100), 3)
        alone = network.unroll(stack(examples[2:3], 100), 3)
    for ahead in range(3):
        torch.testing.assert_close(
            together[ahead][2, ahead:], alone[ahead][0, ahead:], atol=1e-5, rtol=1e-5
        )
