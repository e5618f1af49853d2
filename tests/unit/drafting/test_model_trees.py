"""The tree around the chain that a draft model would propose."""

from pathlib import Path

import pytest

from outrider.drafting.base import DraftLaw, DraftRequest
from outrider.drafting.draft_model import PlainDraftModel
from outrider.drafting.model import ModelDrafter
from outrider.messages import AcceptanceRule, Draft, SamplingParams
from outrider.model.loading import LoadedModel, load_model
from tests.support.models import TOKENS, save_model
from tests.support.stepping import Reference

PROMPT = [5, 9, 2, 30]
SAMPLINGS = [SamplingParams(), SamplingParams(0.8, seed=5)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("drafter"))


@pytest.fixture(scope="module")
def model(path: Path) -> LoadedModel:
    return load_model(str(path))


def drafted(
    model: LoadedModel, width: int, law: DraftLaw, sampling: SamplingParams, k: int = 3
) -> Draft:
    drafter = ModelDrafter(
        PlainDraftModel(model, total_blocks=8, token_count=TOKENS), tree_width=width
    )
    drafter.open("s", PROMPT, sampling, law)
    (draft,) = drafter.propose([DraftRequest("s", k)])
    assert draft is not None
    return draft


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_the_best_first_on_each_level_and_the_next_best_beside_it(
    model: LoadedModel, sampling: SamplingParams
) -> None:
    chain = drafted(model, 1, DraftLaw(max_nodes=64), sampling)
    assert chain.parents == ()
    tree = drafted(model, 3, DraftLaw(max_nodes=64), sampling)
    assert tree.parents == (-1, -1, -1, 0, 0, 0, 3, 3, 3)
    assert tree.token_ids[::3] == chain.token_ids
    assert tree.depths == (1, 1, 1, 2, 2, 2, 3, 3, 3)
    for level in range(3):
        assert len(set(tree.token_ids[3 * level : 3 * level + 3])) == 3


@pytest.mark.parametrize(
    ("max_nodes", "parents"),
    [
        (0, ()),
        (3, ()),
        (4, (-1, -1, 0, 2)),
        (6, (-1, -1, -1, 0, 0, 3)),
        (9, (-1, -1, -1, 0, 0, 0, 3, 3, 3)),
    ],
)
def test_what_there_is_room_for_goes_to_the_first_levels(
    model: LoadedModel, max_nodes: int, parents: tuple[int, ...]
) -> None:
    tree = drafted(model, 3, DraftLaw(max_nodes=max_nodes), SAMPLINGS[0])
    assert tree.parents == parents
    assert len(tree.token_ids) == max(len(parents), 3)


def test_a_sampled_draft_under_the_rejection_rule_is_a_chain(model: LoadedModel) -> None:
    law = DraftLaw(rule=AcceptanceRule.REJECTION, max_nodes=64)
    draft = drafted(model, 3, law, SAMPLINGS[1])
    assert (draft.parents, len(draft.token_ids), len(draft.q)) == ((), 3, 3)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("level", range(3))
def test_after_a_sibling_it_continues_as_plain_decoding(
    model: LoadedModel, path: Path, sampling: SamplingParams, level: int
) -> None:
    drafter = ModelDrafter(PlainDraftModel(model, total_blocks=8, token_count=TOKENS), tree_width=3)
    drafter.open("s", PROMPT, sampling, DraftLaw(max_nodes=64))
    (tree,) = drafter.propose([DraftRequest("s", 3)])
    assert tree is not None
    # The path goes through the last sibling of that level.
    committed = [*tree.token_ids[: 3 * level : 3], tree.token_ids[3 * level + 2], 17]
    drafter.commit("s", len(PROMPT), committed)
    (after,) = drafter.propose([DraftRequest("s", 3)])
    assert after is not None
    expected = Reference(path).continuation([*PROMPT, *committed], 3, sampling)
    assert list(after.token_ids[::3]) == expected
