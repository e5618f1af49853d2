"""A model drafter around a network that reads the target's hidden states."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.drafting.base import PLAIN_LAW, DraftLaw, DraftRequest, HiddenStates
from outrider.drafting.hybrid import HybridDrafter
from outrider.drafting.model import ModelDrafter
from outrider.drafting.suffix import SuffixDrafter
from outrider.drafting.trained import TrainedDraftModel
from outrider.drafting.turns import MOST_STATES, DraftSession
from outrider.messages import AcceptanceRule, Draft, SamplingParams
from outrider.model.draft_network import DraftNetwork, load_draft_network
from outrider.model.tensors import packed, unpacked
from tests.support.draft_networks import ReferenceNetwork, save_draft_network
from tests.support.models import TOKENS, save_model

SIZE = 32
IDS = [*range(0, 100, 3), *range(120, 200)]
GREEDY = SamplingParams()
SAMPLED = SamplingParams(0.9, top_k=50, seed=7)
PENALISED = SamplingParams(banned_ids=(3, 6, 120), repetition_penalty=1.1)
SAMPLINGS = {"greedy": GREEDY, "sampled": SAMPLED, "penalised": PENALISED}

State = torch.Tensor | None


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("targets") / "target")


@pytest.fixture(scope="module")
def path(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_draft_network(tmp_path_factory.mktemp("drafts") / "draft", target, ids=IDS)


@pytest.fixture(scope="module")
def network(path: Path, target: Path) -> DraftNetwork:
    return load_draft_network(str(path), str(target))


@pytest.fixture(scope="module")
def reference(path: Path, target: Path) -> ReferenceNetwork:
    return ReferenceNetwork(path, target)


def drafter_of(network: DraftNetwork, blocks: int = 16, **options: Any) -> ModelDrafter:
    model = TrainedDraftModel(network, total_blocks=blocks, token_count=TOKENS)
    return ModelDrafter(model, **options)


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(7 * i * i + 13 * i + salt) % TOKENS for i in range(length)]


def hidden(count: int, salt: int = 0) -> torch.Tensor:
    """States as the target would send them: numbers of bfloat16."""
    generator = torch.Generator().manual_seed(100 + salt)
    return torch.randn(count, SIZE, generator=generator).bfloat16().float()


def proposed(drafter: Any, draft_len: int, session_id: str = "s") -> tuple[int, ...]:
    (draft,) = drafter.propose([DraftRequest(session_id, draft_len)])
    assert draft is not None
    ids: tuple[int, ...] = draft.token_ids
    return ids


def test_tensors_there_and_back() -> None:
    rows = hidden(3)
    message = packed(rows)
    assert (message.dtype, message.shape, len(message.data)) == ("bfloat16", (3, SIZE), 6 * SIZE)
    assert torch.equal(unpacked(message), rows)


def test_it_says_what_it_reads(network: DraftNetwork, target: Path, tmp_path: Path) -> None:
    assert drafter_of(network).reads == HiddenStates(2, SIZE)
    assert HybridDrafter(SuffixDrafter(), drafter_of(network)).reads == HiddenStates(2, SIZE)
    assert SuffixDrafter().reads is None
    plain = save_draft_network(tmp_path / "plain", target, reads_hidden=False)
    assert drafter_of(load_draft_network(str(plain), str(target))).reads is None


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("accepted", range(4))
def test_drafts_are_those_of_the_network_step_by_step(
    network: DraftNetwork, reference: ReferenceNetwork, sampling: SamplingParams, accepted: int
) -> None:
    k = 3
    drafter = drafter_of(network)
    tokens = prompt(21)
    states: list[State] = [None] * len(tokens)
    drafter.open("s", tokens, sampling)
    for turn in range(3):
        draft = proposed(drafter, k)
        assert draft == reference.draft(tokens, states, k, sampling)
        # Asked again, it feeds the last token again, with its state.
        assert proposed(drafter, k) == draft
        new = hidden(accepted + 1, turn)
        committed = [*draft[:accepted], 11 + turn]
        drafter.commit("s", len(tokens), committed, packed(new))
        tokens += committed
        states += new.unbind(0)
    assert proposed(drafter, k) == reference.draft(tokens, states, k, sampling)
    # The drafts depend on the states.
    assert any(
        reference.draft(tokens[:n], states[:n], k, sampling)
        != reference.draft(tokens[:n], [None] * n, k, sampling)
        for n in range(21, len(tokens) + 1)
    )


def test_without_states_drafted_tokens_keep_the_networks_own(
    network: DraftNetwork, reference: ReferenceNetwork
) -> None:
    drafter = drafter_of(network)
    tokens = prompt(9)
    drafter.open("s", tokens, GREEDY)
    draft = proposed(drafter, 4)
    drafter.commit("s", 9, [*draft[:2], 5])
    known: list[State] = [None] * len(tokens)
    for end in range(2):
        known.append(reference.step([*tokens, *draft[:end]], known)[1])
    tokens += [*draft[:2], 5]
    assert proposed(drafter, 3) == reference.draft(tokens, [*known, None], 3, GREEDY)


def test_states_of_several_commits_are_fed_together(
    network: DraftNetwork, reference: ReferenceNetwork
) -> None:
    drafter = drafter_of(network)
    tokens = prompt(9)
    states: list[State] = [None] * 9
    drafter.open("s", tokens, GREEDY)
    proposed(drafter, 4)
    for turn, count in enumerate((2, 1, 3)):
        new = hidden(count, turn)
        # The second one comes without.
        sent = packed(new) if turn != 1 else None
        drafter.commit("s", len(tokens), prompt(count, turn), sent)
        tokens += prompt(count, turn)
        states += new.unbind(0) if turn != 1 else [None]
    assert proposed(drafter, 4) == reference.draft(tokens, states, 4, GREEDY)


def test_what_was_evicted_is_rebuilt_without_states(
    network: DraftNetwork, reference: ReferenceNetwork
) -> None:
    # Each session takes two blocks of three.
    drafter = drafter_of(network, blocks=3)
    tokens = prompt(20)
    for name in "st":
        drafter.open(name, tokens, GREEDY)
    proposed(drafter, 2)
    new = hidden(3)
    drafter.commit("s", 20, [1, 2, 3], packed(new))
    tokens = [*tokens, 1, 2, 3]
    full: list[State] = [None] * 20 + list(new)
    assert proposed(drafter, 2) == reference.draft(tokens, full, 2, GREEDY)
    assert proposed(drafter, 2, "t")
    # The state of the last token is still there: it was to be fed again anyway.
    rest: list[State] = [None] * 22 + [new[-1]]
    assert proposed(drafter, 2) == reference.draft(tokens, rest, 2, GREEDY)
    drafter.close("s")
    drafter.close("t")
    assert drafter.free_blocks == 3


def test_states_that_nobody_asks_for_are_let_go(
    network: DraftNetwork, reference: ReferenceNetwork
) -> None:
    drafter = drafter_of(network)
    tokens = prompt(5)
    drafter.open("s", tokens, GREEDY)
    new = hidden(MOST_STATES + 10)
    committed = prompt(len(new), 3)
    drafter.commit("s", 5, committed[:100], packed(new[:100]))
    drafter.commit("s", 105, committed[100:], packed(new[100:]))
    tokens += committed
    known: list[State] = [None] * 15 + list(new[10:])
    assert proposed(drafter, 4) == reference.draft(tokens, known, 4, GREEDY)


def test_a_session_keeps_the_states_of_a_bounded_number_of_tokens() -> None:
    session = DraftSession("s", prompt(5), GREEDY, PLAIN_LAW)
    for _ in range(3):
        session.token_ids += prompt(100)
        session.note_states(hidden(100))
    assert sorted(session.states) == list(range(305 - MOST_STATES, 305))
    session.note_fed(305)
    # The last token may be fed again.
    assert list(session.states) == [304]


def test_a_batch_equals_each_session_alone(
    network: DraftNetwork, reference: ReferenceNetwork
) -> None:
    drafter = drafter_of(network)
    texts: dict[str, list[int]] = {}
    known: dict[str, list[State]] = {}
    params = {"a": GREEDY, "b": SAMPLED, "c": PENALISED, "d": GREEDY}
    for number, (name, sampling) in enumerate(params.items()):
        texts[name] = prompt(5 + 6 * number, number)
        known[name] = [None] * len(texts[name])
        drafter.open(name, texts[name], sampling)
    lengths = {"a": 3, "b": 1, "c": 4, "d": 0}
    for turn in range(3):
        drafts = drafter.propose([DraftRequest(name, lengths[name]) for name in params])
        for name, draft in zip(params, drafts, strict=True):
            expected = reference.draft(texts[name], known[name], lengths[name], params[name])
            assert draft == Draft(expected)
            new = hidden(2, turn)
            drafter.commit(name, len(texts[name]), [turn, 7], packed(new))
            texts[name] += [turn, 7]
            known[name] += new.unbind(0)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_trees_and_q_name_ids_of_the_target(
    network: DraftNetwork, reference: ReferenceNetwork, sampling: SamplingParams
) -> None:
    drafter = drafter_of(network, tree_width=3)
    tokens = prompt(12)
    drafter.open("s", tokens, sampling, DraftLaw(max_nodes=64))
    (tree,) = drafter.propose([DraftRequest("s", 3)])
    assert tree is not None
    assert tree.token_ids[::3] == reference.draft(tokens, [None] * 12, 3, sampling)
    assert set(tree.token_ids) <= set(IDS)
    law = DraftLaw(rule=AcceptanceRule.REJECTION, q_top=20)
    drafter.open("r", tokens, SAMPLED, law)
    (chain,) = drafter.propose([DraftRequest("r", 3)])
    assert chain is not None
    assert len(chain.q) == 3
    for token, q in zip(chain.token_ids, chain.q, strict=True):
        assert token in q.token_ids
        assert set(q.token_ids) <= set(IDS)
    logits, _ = reference.step(tokens, [None] * 12)
    p = (logits.double() / 0.9).softmax(-1)
    best: Sequence[int] = chain.q[0].token_ids
    ratio = chain.q[0].weights[1] / chain.q[0].weights[0]
    columns = [IDS.index(token) for token in best[:2]]
    assert ratio == pytest.approx(float(p[columns[1]] / p[columns[0]]), rel=1e-3)
