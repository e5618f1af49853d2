"""Weights that were laid out for one forward are refused to any other."""

from pathlib import Path

import pytest

from outrider.errors import InternalError
from outrider.model.linears.install import Packer
from outrider.model.loading import load_model
from outrider.model.numerics import FAST, choose_numerics
from outrider.model.paged import PagedModel
from outrider.model.selfcheck import OwnLogits
from tests.support.models import save_model

GONE = r"the weight of model\.layers\.0\.self_attn\.q_proj .* is gone"


@pytest.mark.parametrize("forward", ["lean", "compiled"])
def test_a_model_that_was_laid_out_is_refused(tmp_path: Path, forward: str) -> None:
    # Heads of whole vectors, which can be compiled.
    model = load_model(str(save_model(tmp_path, "qwen3")))
    numerics = choose_numerics(FAST, model, forward=forward)
    for again in ("lean", "module", "compiled"):
        with pytest.raises(InternalError, match=GONE):
            choose_numerics(FAST, model, forward=again)
    with pytest.raises(InternalError, match=GONE):
        PagedModel(model, 4)
    with pytest.raises(InternalError, match=GONE):
        OwnLogits.of(model)
    with pytest.raises(InternalError, match="the weight of Linear"):
        Packer().fuse([model.module.get_submodule("model.layers.0.mlp.up_proj")])
    # The forward that has them goes on, and another may have a copy of what is left alone.
    PagedModel(model, 4, numerics)
    fresh = load_model(str(tmp_path))
    choose_numerics(FAST, fresh, forward=forward, release=False)
    PagedModel(fresh, 4)
