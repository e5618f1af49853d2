"""Acceptance that is counted on texts is what drafting token by token gives."""

import torch

from outrider.training.acceptance import Acceptance, acceptance
from outrider.training.corpus import Example
from outrider.training.network import DraftNetwork
from outrider.training.start import least_squares, positions_of
from tests.support.models import VOCABULARY
from tests.unit.training.test_network import as_llama, drafted_states


def test_acceptance_is_that_of_drafting_step_by_step(
    network: DraftNetwork, examples: list[Example]
) -> None:
    ids = sorted({token for example in examples for token in example.answer})[:-1]
    network.head = network.embeddings[ids]
    # So that many drafts are right.
    least_squares(network, examples, torch.ones(network.shape.target_hidden))
    found = acceptance(network, examples, positions_of(ids, VOCABULARY), 3)
    llama = as_llama(network)
    rounds, accepted = 0, [0, 0, 0]
    for example in examples:
        last = 0
        while last < len(example.answer) - 1:
            rounds += 1
            states = drafted_states(network, llama, example, last, 3)
            drafted = [ids[int((network.head @ state).argmax())] for state in states]
            count = 0
            for own, said in zip(drafted, example.answer[last + 1 :], strict=False):
                if own != said:
                    break
                accepted[count] += 1
                count += 1
            last += count + 1
    assert (found.rounds, found.accepted) == (rounds, tuple(accepted))
    assert 0 < accepted[0] < rounds


def test_a_network_without_rounds_has_no_rate() -> None:
    nothing = Acceptance(0, (0, 0), (0, 0))
    assert nothing.mean_length == 1.0
    assert nothing.by_position == (0.0, 0.0)


def test_what_is_right_at_once_counts_at_every_position() -> None:
    found = Acceptance(10, (10, 6, 3), (6, 3, 3))
    assert found.mean_length == 2.2
    assert found.by_position == (0.6, 0.5, 1.0)
