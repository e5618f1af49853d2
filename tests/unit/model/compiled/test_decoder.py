"""The compiled forward: the model's own, with the same bits in any company and on any processor."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from outrider.errors import UnsupportedModelError
from outrider.model.blocks import BlockTable
from outrider.model.compiled.decoder import CompiledDecoder
from outrider.model.invariance import first_dependence
from outrider.model.lean import LeanDecoder
from outrider.model.linears.tiled import torch_threads
from outrider.model.loading import load_model
from outrider.model.numerics import COMPILED, FAST, INVARIANT, LEAN, choose_numerics
from outrider.model.paged import NO_PARENT, PagedModel, Segment
from tests.support.forwards import ARRANGEMENTS, CONFIGS, own_logits, paged_logits, save
from tests.support.models import VOCABULARY, save_model

BIASED = "llama"  # its outputs and its MLP have biases
COMPILABLE = [name for name in CONFIGS if name != BIASED]
TOKENS = torch.randint(0, VOCABULARY, (90,), generator=torch.Generator().manual_seed(1)).tolist()


def compiled(path: Path) -> PagedModel:
    loaded = load_model(str(path))
    numerics = choose_numerics(FAST, loaded)
    assert isinstance(numerics, CompiledDecoder)
    return PagedModel(loaded, 40, numerics)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("name", COMPILABLE)
def test_compiled_forward_is_the_models_own(name: str, arrangement: str, tmp_path: Path) -> None:
    path = save(tmp_path, name)
    actual = paged_logits(compiled(path), ARRANGEMENTS[arrangement], TOKENS)
    torch.testing.assert_close(actual, own_logits(path, TOKENS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", COMPILABLE)
def test_rows_have_the_same_bits_in_any_company(name: str, tmp_path: Path) -> None:
    loaded = load_model(str(save(tmp_path, name)))
    numerics = choose_numerics(FAST, loaded)
    assert first_dependence(loaded, numerics) == ""


@pytest.mark.parametrize("name", COMPILABLE)
def test_where_the_blocks_lie_does_not_change_a_bit(name: str, tmp_path: Path) -> None:
    model = compiled(save(tmp_path, name))
    first, *others = (paged_logits(model, blocks, TOKENS) for blocks in ARRANGEMENTS.values())
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("name", COMPILABLE)
def test_a_path_of_a_tree_has_the_bits_of_a_chain(name: str, tmp_path: Path) -> None:
    """With a window that ends inside the tree, too: mistral's is 24 tokens."""
    model = compiled(save(tmp_path, name))

    def after_prompt(tokens: Sequence[int], parents: Sequence[int]) -> torch.Tensor:
        table = BlockTable([4, 9, 6, 7, 8])
        model.forward([Segment(TOKENS[:20], table, 0)])
        table.kv_len = 20
        return model.forward([Segment(tokens, table, len(tokens), parents)])

    chain = TOKENS[20:50]
    expected = after_prompt(chain, ())
    # Every token of the chain has a sibling before it that leads nowhere.
    tokens, parents, places = [], [], []
    for depth, token in enumerate(chain):
        parent = places[-1] if places else NO_PARENT
        if depth:
            tokens.append((token + 1) % VOCABULARY)
            parents.append(parent)
        places.append(len(tokens))
        tokens.append(token)
        parents.append(parent)
    found = after_prompt(tokens, parents)
    assert torch.equal(found[places], expected)


def test_many_rows_of_several_sequences_and_no_logits(tmp_path: Path) -> None:
    path = save(tmp_path, "qwen2")
    model = compiled(path)
    a, b = BlockTable([1, 2, 3, 4, 5, 6]), BlockTable([11, 12, 13, 14, 15, 16])
    nothing = model.forward([Segment(TOKENS[:70], a, 0), Segment(TOKENS[10:20], b, 0)])
    assert nothing.shape == (0, VOCABULARY)
    a.kv_len, b.kv_len = 70, 10
    both = model.forward([Segment(TOKENS[70:], a, 3), Segment(TOKENS[20:40], b, 20)])
    torch.testing.assert_close(both[:3], own_logits(path, TOKENS)[-3:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(both[3:], own_logits(path, TOKENS[10:40])[10:], rtol=1e-4, atol=1e-4)


def test_invariant_numerics_are_compiled_where_they_can_be(tmp_path: Path) -> None:
    numerics = choose_numerics(INVARIANT, load_model(str(save(tmp_path, "qwen3"))))
    assert isinstance(numerics, CompiledDecoder)
    assert numerics.arithmetic == "compiled"


@pytest.mark.parametrize(
    ("name", "dtype", "why"),
    [(BIASED, "float32", "bias"), ("qwen3", "bfloat16", "float32"), ("gpt2", "float32", "Llama")],
)
def test_what_cant_be_compiled_says_why_and_runs_otherwise(
    name: str, dtype: str, why: str, tmp_path: Path
) -> None:
    path = save_model(tmp_path, name) if name == "gpt2" else save(tmp_path, name)
    with pytest.raises(UnsupportedModelError, match=f"(?s){why}.*--forward auto"):
        choose_numerics(FAST, load_model(str(path), dtype=dtype), forward=COMPILED)
    assert choose_numerics(FAST, load_model(str(path), dtype=dtype)).arithmetic == "fast"


def test_lean_and_a_kind_of_linears_are_not_compiled(tmp_path: Path) -> None:
    path = str(save(tmp_path, "qwen2"))
    assert isinstance(choose_numerics(FAST, load_model(path), forward=LEAN), LeanDecoder)
    assert isinstance(choose_numerics(FAST, load_model(path), linears="dense"), LeanDecoder)


def digest_of_logits(path: str) -> str:
    """Of every way to run a sequence, on a checkpoint."""
    model = compiled(Path(path))
    rows = [paged_logits(model, blocks, TOKENS) for blocks in ARRANGEMENTS.values()]
    return hashlib.sha256(torch.cat(rows).numpy().tobytes()).hexdigest()


def test_narrower_vectors_give_the_same_bits(tmp_path: Path) -> None:
    """What a processor without AVX-512 would compute, and one whose vectors have four lanes."""
    path = save(tmp_path, "qwen3")
    expected = digest_of_logits(str(path))
    for name, torch_has, features in (
        ("haswell", "avx2", "+avx2,+fma,+bmi,+bmi2,+sse4.2,+avx"),
        ("sandybridge", "default", "+sse4.2,+fma,+avx"),
    ):
        command = (
            "from tests.unit.model.compiled.test_decoder import digest_of_logits\n"
            f"print(digest_of_logits({str(path)!r}))"
        )
        settings = {
            "NUMBA_CPU_NAME": name,
            "NUMBA_CPU_FEATURES": features,
            # The positions' cosines are torch's.
            "ATEN_CPU_CAPABILITY": torch_has,
        }
        found = subprocess.run(
            [sys.executable, "-c", command],
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            check=True,
            timeout=110,
        )
        assert found.stdout.strip() == expected


def test_a_context_that_grows_token_by_token(tmp_path: Path) -> None:
    """Past the room that was made for it, again and again, with one thread and with more."""
    path = save(tmp_path, "qwen2")
    model, table = compiled(path), BlockTable([7, 3, 8, 2, 9, 5])
    present = torch.get_num_threads()
    rows = []
    for index, token in enumerate(TOKENS):
        with torch_threads(1 + index % 3):
            rows.append(model.forward([Segment([token], table, 1)]))
        table.kv_len += 1
    torch.testing.assert_close(torch.cat(rows), own_logits(path, TOKENS), rtol=1e-4, atol=1e-4)
    assert torch.get_num_threads() == present
