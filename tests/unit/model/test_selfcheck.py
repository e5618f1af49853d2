"""The check at start: right models pass it with room to spare, and each fault fails it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from bench.faults import FAULTS
from outrider.errors import UnsupportedModelError
from outrider.model import selfcheck
from outrider.model.loading import DTYPES, LoadedModel, load_model
from outrider.model.numerics import FAST, INVARIANT, choose_numerics
from outrider.model.paged import PagedModel
from outrider.model.selfcheck import OwnLogits, check_paged_forward
from tests.support.models import FAMILIES, save_model

BLOCKS = 40

Load = Callable[[str, str], LoadedModel]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """A model of a family in a type; the same again when it is asked for again."""
    paths: dict[str, Path] = {}
    models: dict[tuple[str, str], LoadedModel] = {}

    def loaded(family: str, dtype: str) -> LoadedModel:
        if family not in paths:
            paths[family] = save_model(tmp_path_factory.mktemp(family), family)
        if (family, dtype) not in models:
            models[family, dtype] = load_model(str(paths[family]), dtype=dtype)
        return models[family, dtype]

    return loaded


def assert_far_from_the_limit(
    model: LoadedModel, paged: PagedModel, own: OwnLogits | None = None
) -> None:
    found = check_paged_forward(own or OwnLogits.of(model), paged)
    assert found is not None
    assert found.ratio < selfcheck.LIMITS[model.module.dtype] / 3
    assert paged.pool.free == BLOCKS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_right_models_are_far_from_the_limit(family: str, dtype: str, load: Load) -> None:
    model = load(family, dtype)
    assert_far_from_the_limit(model, PagedModel(model, BLOCKS))


@pytest.mark.parametrize("numerics", [FAST, INVARIANT])
@pytest.mark.parametrize(("family", "dtype"), [("llama", "bfloat16"), ("gemma2", "float32")])
def test_served_numerics_are_far_from_the_limit(
    family: str, dtype: str, numerics: str, tmp_path: Path
) -> None:
    model = load_model(str(save_model(tmp_path, family)), dtype=dtype)
    own = OwnLogits.of(model)
    paged = PagedModel(model, BLOCKS, choose_numerics(numerics, model))
    assert_far_from_the_limit(model, paged, own)


WRONG = [
    *((family, fault) for family in FAMILIES for fault in ("causality", "lost token", "scaling")),
    *((family, "neighbour") for family in FAMILIES),
    # The attention of this small NeoX hardly depends on positions.
    *((family, "positions") for family in FAMILIES if family != "gpt_neox"),
    ("gemma2", "no window"),
    ("gemma2", "short window"),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "fault"), WRONG, ids="-".join)
def test_what_pages_get_wrong_is_far_beyond_the_limit(
    family: str, fault: str, dtype: str, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_refused(load(family, dtype), fault, monkeypatch)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_soft_cap_that_is_not_applied(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(str(save_model(tmp_path, "gemma2", scale=8.0)), dtype=dtype)
    # A cap that these small scores come near to.
    for layer in model.module.model.layers:
        layer.self_attn.attn_logit_softcapping = 2.0
    assert_far_from_the_limit(model, PagedModel(model, BLOCKS))
    assert_refused(model, "no soft cap", monkeypatch)


def assert_refused(model: LoadedModel, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a margin: a limit half as high again refuses it too."""
    generous = {dtype: 1.5 * limit for dtype, limit in selfcheck.LIMITS.items()}
    monkeypatch.setattr(selfcheck, "LIMITS", generous)
    paged, own = PagedModel(model, BLOCKS), OwnLogits.of(model)
    with FAULTS[fault](), pytest.raises(UnsupportedModelError, match="can't be served exactly"):
        check_paged_forward(own, paged)
    assert paged.pool.free == BLOCKS


def test_a_pool_without_room_is_no_reason_to_refuse(load: Load) -> None:
    model = load("llama", "float32")
    assert check_paged_forward(OwnLogits.of(model), PagedModel(model, 4)) is None
