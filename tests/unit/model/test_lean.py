"""The lean forward against the model's own, in every arrangement of a sequence's blocks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.model.fast import FastNumerics
from outrider.model.lean import LeanDecoder
from outrider.model.linears.kinds import KINDS
from outrider.model.loading import load_model
from outrider.model.numerics import FAST, choose_numerics
from outrider.model.paged import PagedModel
from outrider.model.parts import parts_of
from tests.support.forwards import ARRANGEMENTS, CONFIGS, own_logits, paged_logits, save
from tests.support.models import VOCABULARY, save_model


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_lean_forward_is_the_models_own(name: str, arrangement: str, tmp_path: Path) -> None:
    path = save(tmp_path, name)
    tokens = torch.randint(0, VOCABULARY, (90,), generator=torch.Generator().manual_seed(1))
    loaded = load_model(str(path))
    numerics = choose_numerics(FAST, loaded, linears="dense")
    assert isinstance(numerics, LeanDecoder)
    model = PagedModel(loaded, 40, numerics)
    actual = paged_logits(model, ARRANGEMENTS[arrangement], tokens.tolist())
    torch.testing.assert_close(actual, own_logits(path, tokens.tolist()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_scattered_blocks_do_not_change_other_models(
    family: str, arrangement: str, tmp_path: Path
) -> None:
    path = save_model(tmp_path, family)
    tokens = torch.randint(0, VOCABULARY, (90,), generator=torch.Generator().manual_seed(1))
    loaded = load_model(str(path))
    numerics = choose_numerics(FAST, loaded, linears="dense")
    assert isinstance(numerics, FastNumerics)
    model = PagedModel(loaded, 40, numerics)
    actual = paged_logits(model, ARRANGEMENTS[arrangement], tokens.tolist())
    torch.testing.assert_close(actual, own_logits(path, tokens.tolist()), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", [kind.name for kind in KINDS])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_every_kind_of_linear_gives_the_models_own_logits(
    family: str, kind: str, tmp_path: Path
) -> None:
    path = save_model(tmp_path, family)
    loaded = load_model(str(path))
    model = PagedModel(loaded, 40, choose_numerics(FAST, loaded, linears=kind))
    tokens = list(range(60))
    actual = paged_logits(model, [4, 5, 6, 7], tokens)
    torch.testing.assert_close(actual, own_logits(path, tokens), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("forward", ["compiled", "lean"])
def test_weights_are_in_memory_once(forward: str, tmp_path: Path) -> None:
    loaded = load_model(str(save(tmp_path, "llama-tied")))
    module: Any = loaded.module
    choose_numerics(FAST, loaded, forward=forward)
    held = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in module.parameters()
    }
    embedding = module.get_input_embeddings().weight
    assert embedding.untyped_storage().nbytes() == VOCABULARY * 96 * 4
    # What is left are norms, the embedding, and a number for each of the others.
    assert sum(held.values()) < VOCABULARY * 96 * 4 + 40 * 96 * 4


@pytest.mark.parametrize("change", [{"hidden_act": "gelu"}, {"model_type": "other"}])
def test_a_decoder_that_is_built_otherwise_is_left_to_its_own_code(
    change: dict[str, str], tmp_path: Path
) -> None:
    loaded = load_model(str(save(tmp_path, "llama")))
    for name, value in change.items():
        setattr(loaded.module.config, name, value)
    assert parts_of(loaded.module) is None
    assert isinstance(choose_numerics(FAST, loaded), FastNumerics)
