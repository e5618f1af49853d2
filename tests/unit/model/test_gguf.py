"""A GGUF file, written here as llama.cpp writes it: its weights stay packed and stay its own."""

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.model.blocks import BlockTable
from outrider.model.gguf import GgufWeights
from outrider.model.lean import LeanDecoder
from outrider.model.loading import load_model
from outrider.model.numerics import FAST, choose_numerics
from outrider.model.paged import PagedModel, Segment
from tests.support.gguf_files import LINEARS, write_llama

KINDS = {
    "attn_q": "Q4_1",
    "attn_k": "Q4_1",
    "attn_v": "Q4_1",
    "attn_output": "Q4_0",
    "ffn_gate": "Q4_1",
    "ffn_up": "Q8_0",
    "ffn_down": "Q8_0",
    "token_embd": "Q8_0",
    "output": "F32",
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "tiny.gguf", KINDS)


def test_each_layer_finds_the_integers_that_it_came_from(path: Path) -> None:
    loaded = load_model(str(path))
    module: Any = loaded.module
    weights = GgufWeights(path, module)
    for layer in module.model.layers:
        for own, name in LINEARS.items():
            linear = layer.get_submodule(own)
            found = weights.find(linear)
            assert found is not None, own
            assert torch.equal(found.dense(), linear.weight)
            assert found.bits == (8 if KINDS[name] == "Q8_0" else 4)
    # Not quantised in the file, so not here.
    assert weights.find(module.lm_head) is None


def test_a_layer_whose_weight_was_changed_stays_unpacked(path: Path) -> None:
    loaded = load_model(str(path))
    module: Any = loaded.module
    linear = module.model.layers[0].mlp.down_proj
    with torch.no_grad():
        linear.weight[3, 5] += 1e-3
    assert GgufWeights(path, module).find(linear) is None


@pytest.mark.parametrize("forward", ["lean", "module"])
def test_packed_model_agrees_with_the_unpacked_one(path: Path, forward: str) -> None:
    loaded = load_model(str(path))
    tokens = list(range(40))
    with torch.inference_mode():
        exact = PagedModel(loaded, 8).forward([Segment(tokens, BlockTable([1, 2, 3]), 40)])
    numerics = choose_numerics(FAST, loaded, forward=forward)
    assert isinstance(numerics, LeanDecoder) is (forward == "lean")
    packed = PagedModel(loaded, 8, numerics).forward([Segment(tokens, BlockTable([1, 2, 3]), 40)])
    error = (packed - exact).norm() / exact.norm()
    # Rounding to bfloat16 in each product; anything that is left out makes it far larger.
    assert error < 0.03


def test_unpacked_on_request(path: Path) -> None:
    loaded = load_model(str(path))
    tokens = list(range(40))
    exact = PagedModel(loaded, 8).forward([Segment(tokens, BlockTable([1, 2, 3]), 40)])
    numerics = choose_numerics(FAST, loaded, linears="dense")
    dense = PagedModel(loaded, 8, numerics).forward([Segment(tokens, BlockTable([1, 2, 3]), 40)])
    torch.testing.assert_close(dense, exact, rtol=1e-4, atol=1e-4)
