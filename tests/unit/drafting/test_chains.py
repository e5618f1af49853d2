"""Whole proposals in compiled code: what they say is what the network says, but for rounding."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.drafting.base import DraftRequest
from outrider.drafting.model import ModelDrafter
from outrider.drafting.trained import TrainedDraftModel
from outrider.messages import SamplingParams
from outrider.model.blocks import BlockTable
from outrider.model.chains import ChainTurn, Levels
from outrider.model.compiled.draft_chains import DraftChains
from outrider.model.draft_network import load_draft_network
from outrider.model.numerics import FAST, choose_numerics
from outrider.model.tensors import packed
from outrider.sampling.noise import gumbels
from tests.support.draft_networks import ReferenceNetwork, save_draft_network
from tests.support.models import TOKENS, save_model

SIZE = 32
IDS = [*range(0, 100, 3), *range(120, 200)]
# What weights of 8 bits may move a chance, a score or a product by.
CLOSE = 0.05
GREEDY = SamplingParams()
# A network whose input is not fused, with all ids, and one of two layers with some.
KINDS: dict[str, dict[str, Any]] = {
    "reads": {"ids": IDS},
    "does not read": {"reads_hidden": False},
    "two layers": {"ids": IDS, "layers": 2},
}


class Pair:
    """A network's chains and what it says by plain arithmetic."""

    def __init__(self, path: Path, target: Path) -> None:
        self.network = load_draft_network(str(path), str(target))
        chains = DraftChains.of(self.network, TOKENS)
        assert chains is not None
        numerics = choose_numerics(FAST, self.network.model)
        self.model = TrainedDraftModel(
            self.network, total_blocks=256, token_count=TOKENS, numerics=numerics, chains=chains
        )
        self.chains = chains
        self.reference = ReferenceNetwork(path, target)

    def table(self, tokens: int, kv_len: int = 0) -> BlockTable:
        table = BlockTable()
        self.model.pool.grow(table, tokens)
        table.kv_len = kv_len
        return table


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    where = tmp_path_factory.mktemp("pair")
    target = save_model(where / "target")
    return Pair(save_draft_network(where / "draft", target, **request.param), target)


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(7 * i * i + 13 * i + salt) % TOKENS for i in range(length)]


def hidden(count: int, salt: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + salt)
    return list(torch.randn(count, SIZE, generator=generator).bfloat16().float())


def check(
    pair: Pair,
    levels: Levels,
    tokens: Sequence[int],
    states: Sequence[torch.Tensor | None],
    temperature: float = 0.0,
    seed: int = 0,
) -> None:
    """Each level has the best tokens of its logits, and their chances."""
    text, known = list(tokens), list(states)
    columns = {int(token): i for i, token in enumerate(pair.reference.head_ids)}
    for found, chances in zip(levels.tokens, levels.chances, strict=True):
        logits, state = pair.reference.step(text, known)
        logits = logits[pair.reference.head_ids < TOKENS]
        if temperature:
            noise = gumbels([seed], [len(text)], TOKENS)[0]
            logits = logits / temperature + noise[pair.reference.head_ids[: len(logits)]]
        expected = logits.softmax(-1)
        assert chances == sorted(chances, reverse=True)
        assert len(set(found)) == len(found)
        for token, chance in zip(found, chances, strict=True):
            assert abs(float(expected[columns[token]]) - chance) < CLOSE
        assert float(expected.max()) - chances[0] < CLOSE
        text.append(found[0])
        known.append(state)


def test_they_say_what_the_network_says(pair: Pair) -> None:
    tokens, states = prompt(37), dict(enumerate(hidden(5), 30))
    (levels,) = pair.chains.draft([ChainTurn(tokens, pair.table(64), 5, states)])
    assert len(levels.tokens) == 5
    check(pair, levels, tokens, [states.get(i) for i in range(37)])


def test_with_a_temperature_they_have_the_noise_of_the_target(pair: Pair) -> None:
    tokens = prompt(20)
    turn = ChainTurn(tokens, pair.table(48), 4, temperature=0.7, seed=9)
    (levels,) = pair.chains.draft([turn])
    check(pair, levels, tokens, [None] * 20, 0.7, 9)
    others = pair.chains.draft([ChainTurn(tokens, turn.table, 4, temperature=0.7, seed=10)])
    assert others != [levels]


def test_sessions_together_say_what_each_says_alone(pair: Pair) -> None:
    turns = [
        ChainTurn(prompt(30, 1), pair.table(48), 4, {3: hidden(1)[0]}),
        ChainTurn(prompt(5, 2), pair.table(48), 0),
        ChainTurn(prompt(9, 3), pair.table(48), 2),
    ]
    together = pair.chains.draft(turns)
    alone = [pair.chains.draft([turn])[0] for turn in turns]
    assert [levels.tokens for levels in together] == [levels.tokens for levels in alone]
    assert [len(levels.tokens) for levels in together] == [4, 0, 2]


def test_what_was_fed_before_need_not_be_fed_again(pair: Pair) -> None:
    tokens, states = prompt(40), hidden(40)
    (whole,) = pair.chains.draft([ChainTurn(tokens, pair.table(64), 3, dict(enumerate(states)))])
    table = pair.table(64)
    for begin, end in ((0, 17), (17, 38)):
        table.kv_len = begin
        part = dict(enumerate(states[begin:end]))
        pair.chains.draft([ChainTurn(tokens[begin:end], table, 0, part)])
    table.kv_len = 38
    rest = dict(enumerate(states[38:]))
    assert pair.chains.draft([ChainTurn(tokens[38:], table, 3, rest)]) == [whole]


def test_a_draft_ends_where_it_is_not_reached(pair: Pair) -> None:
    tokens = prompt(12)
    turn = ChainTurn(tokens, pair.table(48), 6)
    (whole,) = pair.chains.draft([turn])
    first, second = whole.chances[0][0], whole.chances[1][0]
    cut = ChainTurn(tokens, turn.table, 6, worth=(first + first * second) / 2)
    assert len(pair.chains.draft([cut])[0].tokens) == 2
    # Chances that have proved too small count for more.
    trusted = ChainTurn(tokens, turn.table, 6, worth=cut.worth, trust=1e9)
    assert pair.chains.draft([trusted]) == [whole]


def test_a_drafter_goes_on_from_what_was_committed(pair: Pair) -> None:
    def proposed(drafter: ModelDrafter) -> list[int]:
        (draft,) = drafter.propose([DraftRequest("s", 4)])
        assert draft is not None
        return list(draft.token_ids)

    drafter = ModelDrafter(pair.model)
    tokens = prompt(21)
    drafter.open("s", tokens, GREEDY)
    states: list[torch.Tensor] = []
    for accepted in (2, 0, 4, 1):
        draft = proposed(drafter)
        committed, new = [*draft[:accepted], 11 + accepted], hidden(accepted + 1, accepted)
        drafter.commit("s", len(tokens), committed, packed(torch.stack(new)))
        tokens += committed
        states += new
    again = ModelDrafter(pair.model)
    again.open("s", tokens[:21], GREEDY)
    again.commit("s", 21, tokens[21:], packed(torch.stack(states)))
    assert proposed(drafter) == proposed(again)
    drafter.close("s")
    again.close("s")


def test_states_that_come_with_a_commit_are_fed(pair: Pair) -> None:
    tokens, states = prompt(18), hidden(3)
    drafter = ModelDrafter(pair.model)
    drafter.open("s", tokens, GREEDY)
    drafter.propose([DraftRequest("s", 3)])
    drafter.commit("s", 18, [5, 6, 7], packed(torch.stack(states)))
    (draft,) = drafter.propose([DraftRequest("s", 1)])
    known = [None] * 18 + (states if pair.model.reads else [None] * 3)
    assert draft is not None
    logits, _ = pair.reference.step([*tokens, 5, 6, 7], known)
    chances = logits.softmax(-1)
    column = pair.reference.head_ids.tolist().index(draft.token_ids[0])
    assert float(chances.max() - chances[column]) < CLOSE
    drafter.close("s")
