"""Pairs of checkpoints: compared as far as the target can produce the ids."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from draft_worker.config import Settings
from draft_worker.drafters import build
from outrider.drafting.base import DraftRequest
from outrider.errors import TokenizerMismatchError
from outrider.messages import SamplingParams
from outrider.model.pairs import check_models
from outrider.model.tokenizers import check_pair, load_tokenizer, producible_ids
from tests.support.drafters import with_other_padding
from tests.support.models import EOS, TOKENS, VOCABULARY, save_model

REDIS = "redis://127.0.0.1:1/0"


def add_tokens(path: Path, *tokens: str) -> None:
    """Give the tokenizer tokens that the model has no row for, or none of its own."""
    backend = Backend.from_file(str(path / "tokenizer.json"))
    backend.add_special_tokens(list(tokens))
    backend.save(str(path / "tokenizer.json"))


def rename(path: Path, token: str, new: str) -> None:
    file = path / "tokenizer.json"
    file.write_text(file.read_text().replace(json.dumps(token), json.dumps(new)))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return save_model(tmp_path / "target")


@pytest.fixture
def drafter(target: Path, tmp_path: Path) -> Path:
    return with_other_padding(target, tmp_path / "drafter", rows=VOCABULARY + 32, noise=0.05)


def test_producible_ids_have_a_token_and_a_row(target: Path) -> None:
    tokenizer = load_tokenizer(str(target))
    assert producible_ids(tokenizer, VOCABULARY) == TOKENS
    assert producible_ids(tokenizer, 100) == 100


def test_case_22_a_token_that_the_target_lacks_is_served(target: Path, drafter: Path) -> None:
    pair = check_models(str(target), str(drafter))
    assert pair.producible == TOKENS
    assert pair.drafter.tokens[TOKENS] == "<extra>"
    assert TOKENS not in pair.target.tokens
    with pytest.raises(TokenizerMismatchError, match=f"id {TOKENS} is no token"):
        check_pair(pair.target, pair.drafter)


def test_case_22_added_tokens_without_a_row_in_the_target_are_served(
    target: Path, drafter: Path
) -> None:
    # As many tokens as there are rows, and two more that can't come out.
    fill = [f"<fill {n}>" for n in range(TOKENS, VOCABULARY)]
    add_tokens(target, *fill, "<tool>", "<image>")
    plain = save_model(drafter.with_name("plain"))
    add_tokens(plain, *fill)
    assert check_models(str(target), str(plain)).producible == VOCABULARY
    # The last id that has a row counts.
    rename(plain, fill[-1], "<other>")
    with pytest.raises(TokenizerMismatchError, match=f"id {VOCABULARY - 1} is '{fill[-1]}'"):
        check_models(str(target), str(plain))


def test_case_23_the_first_id_that_differs_is_named(target: Path, drafter: Path) -> None:
    rename(drafter, "<eos>", "<end>")
    with pytest.raises(TokenizerMismatchError) as refused:
        check_models(str(target), str(drafter))
    assert f"id {EOS} is '<eos>' in {target} and '<end>' in {drafter}" in refused.value.message
    settings = Settings(
        redis_url=REDIS, drafter="model", draft_model=str(drafter), target=str(target)
    )
    with pytest.raises(TokenizerMismatchError, match="<end>"):
        build(settings)


def test_case_22_such_a_drafter_never_proposes_what_the_target_lacks(
    target: Path, drafter: Path
) -> None:
    settings = Settings(
        redis_url=REDIS, drafter="model", draft_model=str(drafter), target=str(target)
    )
    chosen = build(settings)
    # To the coordinator it fits: where they differ, nothing ever comes out.
    assert chosen.tokenizer_fingerprint == load_tokenizer(str(target)).fingerprint
    alone = build(Settings(redis_url=REDIS, drafter="model", draft_model=str(drafter)))
    assert alone.tokenizer_fingerprint == load_tokenizer(str(drafter)).fingerprint
    highest = {}
    for name, drafting in (("paired", chosen.drafter), ("alone", alone.drafter)):
        ids = []
        for seed in range(30):
            drafting.open("s", [1, 2, 3], SamplingParams(1.0, seed=seed))
            (draft,) = drafting.propose([DraftRequest("s", 8)])
            assert draft is not None
            ids += draft.token_ids
        highest[name] = max(ids)
    assert highest["paired"] < TOKENS
    # Its own padding is loud: without the target it would propose its own token.
    assert highest["alone"] == TOKENS
