from pathlib import Path

import pytest

from draft_worker.config import Settings
from draft_worker.drafters import build
from outrider.drafting.base import DraftRequest, HiddenStates
from outrider.errors import ConfigError
from outrider.messages import SamplingParams
from outrider.model.describe import describe
from outrider.model.tokenizers import load_tokenizer
from tests.support.draft_networks import save_draft_network
from tests.support.models import CONTEXT, TOKENS, save_model

URL = "redis://127.0.0.1:6379/0"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"drafter": "model"}, "--draft-model"),
        ({"drafter": "ngram", "draft_model": "/models/x"}, "--draft-model"),
        ({"drafter": "ngram", "tree_width": 2}, "--tree-width"),
        ({"drafter": "hybrid"}, "--draft-model"),
        ({"drafter": "suffix", "draft_model": "/models/x"}, "--draft-model"),
        ({"drafter": "suffix", "tree_width": 2}, "--tree-width"),
        ({"drafter": "suffix", "suffix_memory": "much"}, "much"),
        ({"drafter": "early-exit"}, "--target"),
        ({"drafter": "model", "draft_model": "/models/x", "exit_layers": 2}, "--exit-layers"),
        ({"ngram_min": 5, "ngram_max": 4}, "--ngram-min"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(
    settings: dict[str, object], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        Settings(redis_url=URL, **settings)  # type: ignore[arg-type]  # a table of settings


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_the_lookup_drafters_fit_every_target(drafter: str) -> None:
    chosen = build(Settings(redis_url=URL, drafter=drafter))
    assert chosen.drafter.name == drafter
    assert (chosen.model_fingerprint, chosen.tokenizer_fingerprint, chosen.context_len) == (
        "",
        "",
        0,
    )


def test_the_first_layers_of_the_target_have_its_tokenizer(tmp_path: Path) -> None:
    target = str(save_model(tmp_path))
    chosen = build(Settings(redis_url=URL, drafter="early-exit", target=target))
    assert chosen.drafter.name.endswith("-first-1")
    assert chosen.tokenizer_fingerprint == load_tokenizer(target).fingerprint
    assert chosen.model_fingerprint != describe(target).fingerprint
    assert chosen.context_len == CONTEXT
    # Padding ids of the target are none of its tokens.
    drafter = chosen.drafter
    for number in range(8):
        drafter.open(str(number), [number], SamplingParams(1.0, seed=number))
        (draft,) = drafter.propose([DraftRequest(str(number), 16)])
        assert draft is not None
        assert max(draft.token_ids) < TOKENS


def test_a_hybrid_has_a_model_and_its_figures(tmp_path: Path) -> None:
    model = str(save_model(tmp_path))
    chosen = build(Settings(redis_url=URL, drafter="hybrid", draft_model=model, target=model))
    assert chosen.drafter.name == f"suffix+{describe(model).name}"
    assert chosen.model_fingerprint == describe(model).fingerprint
    assert chosen.drafter.kv_blocks[1] > 0


@pytest.mark.parametrize("drafter", ["model", "hybrid"])
def test_a_drafter_that_was_trained_for_the_target(tmp_path: Path, drafter: str) -> None:
    target = str(save_model(tmp_path / "target"))
    draft = str(save_draft_network(tmp_path / "draft", tmp_path / "target", ids=range(0, 270, 2)))
    settings = Settings(redis_url=URL, drafter=drafter, draft_model=draft, target=target)
    chosen = build(settings)
    assert chosen.drafter.name.endswith("draft")
    assert chosen.drafter.reads == HiddenStates(2, 32)
    assert chosen.model_fingerprint == describe(draft).fingerprint
    assert chosen.tokenizer_fingerprint == load_tokenizer(target).fingerprint
    assert chosen.context_len == CONTEXT
    chosen.drafter.open("s", [1, 2, 3], SamplingParams(1.0, seed=1))
    (proposal,) = chosen.drafter.propose([DraftRequest("s", 16)])
    assert proposal is not None
    assert len(proposal.token_ids) == 16
    assert all(token < TOKENS and token % 2 == 0 for token in proposal.token_ids)


def test_a_drafter_that_reads_its_target_needs_it(tmp_path: Path) -> None:
    save_model(tmp_path / "target")
    draft = str(save_draft_network(tmp_path / "draft", tmp_path / "target"))
    with pytest.raises(ConfigError, match="give --target"):
        build(Settings(redis_url=URL, drafter="model", draft_model=draft))
