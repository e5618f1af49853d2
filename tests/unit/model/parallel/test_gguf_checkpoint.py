"""A GGUF file on several ranks: slices of its own weights, packed as they are there."""

import gc
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from outrider.errors import UnsupportedModelError
from outrider.messages import SamplingParams
from outrider.model.blocks import BlockTable
from outrider.model.lean import LeanDecoder
from outrider.model.linears import install
from outrider.model.linears.packed import QuantisedLinear
from outrider.model.loading import load_model
from outrider.model.numerics import FAST, choose_numerics
from outrider.model.paged import Segment
from outrider.model.parallel.gguf_checkpoint import GgufCheckpoint
from outrider.model.parallel.group import Limits, RankGroup
from outrider.model.parallel.outline import outline_shard
from outrider.model.parallel.shards import Shard, load_shard
from outrider.sampling.rows import Row
from outrider.sampling.scores import Choosing
from tests.support.gguf_files import Shape, write_llama
from tests.support.ranks import alone, running

# On two ranks as on three all slices are whole groups of 32 and heads of 32.
SHAPE = Shape(heads=6, kv_heads=6, hidden=192, inner=192, vocabulary=288)
KINDS = {
    "token_embd": "Q8_0",
    "attn_q": "Q4_1",
    "attn_k": "Q4_1",
    "attn_v": "Q4_1",
    "attn_output": "Q4_0",
    "ffn_gate": "Q4_1",
    "ffn_up": "Q4_1",
    "ffn_down": "Q8_0",
}
# Relative, L2; and the margin of a near tie in standard deviations of a row of logits.
ROUNDING, NEAR = 0.03, 0.05
PROMPTS = [[(5 * i + seed) % 288 for i in range(7 + seed)] for seed in range(8)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("packed") / "tiny.gguf", KINDS, SHAPE)


def shards(path: Path, size: int, *, packed: bool = True, dtype: str = "float32") -> list[Shard]:
    """Loading talks to nobody."""
    return [
        load_shard(
            str(path),
            RankGroup(rank, size, None, None, torch.device("cpu"), Limits()),
            dtype=dtype,
            packed=packed,
        )
        for rank in range(size)
    ]


def plain(module: Any, name: str) -> torch.Tensor:
    """A weight of a shard as numbers."""
    layer = module.get_submodule(name.removesuffix(".weight"))
    weight: torch.Tensor = getattr(layer, "inner", layer).weight
    return weight.detach()


@pytest.mark.parametrize("packed", [True, False])
def test_slices_of_all_ranks_make_the_model_that_transformers_reads(
    path: Path, packed: bool
) -> None:
    whole = load_model(str(path)).module
    parts = [shard.model.module for shard in shards(path, 3, packed=packed)]
    kept = [part.get_submodule("lm_head") for part in parts]
    assert all(isinstance(one, QuantisedLinear) for one in kept) is packed
    for name, value in whole.named_parameters():
        own = [plain(part, name) for part in parts]
        if "norm" in name:
            assert all(torch.equal(part, value) for part in own)
        else:
            along = 1 if "o_proj" in name or "down_proj" in name else 0
            assert torch.equal(torch.cat(own, along), value), name
    head = torch.cat([plain(part, "lm_head.weight") for part in parts])
    assert torch.equal(head, plain(whole, "lm_head.weight"))


def test_columns_that_are_no_whole_groups_are_cut_once_unpacked(tmp_path: Path) -> None:
    # Of 96 inputs a rank has 48, which is a group and a half.
    path = write_llama(tmp_path / "tiny.gguf", KINDS)
    with pytest.raises(UnsupportedModelError) as refused:
        shards(path, 2)
    assert "down_proj can't be split over 2 ranks as it is packed" in refused.value.message
    assert "of its 96 inputs, 3 groups of 32, a rank would have 48, 1.5" in refused.value.message
    name = "model.layers.1.mlp.down_proj.weight"
    parts = [plain(shard.model.module, name) for shard in shards(path, 2, packed=False)]
    assert torch.equal(torch.cat(parts, 1), load_model(str(path)).module.get_parameter(name))


def test_a_file_of_another_family_is_refused(tmp_path: Path) -> None:
    module = shards(write_llama(tmp_path / "llama.gguf", KINDS), 1)[0].model.module
    path = write_llama(tmp_path / "other.gguf", KINDS, architecture="phi3")
    with pytest.raises(UnsupportedModelError, match="is of architecture phi3"):
        GgufCheckpoint(path, module)


def test_only_the_own_slices_are_read_and_what_is_kept_is_what_the_plan_says(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = gguf.GGUFReader(path)
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in reader.tensors}
    # The embedding is read once for itself, and once packed for the head.
    total = sum(sizes.values()) + sizes["token_embd.weight"]
    norms = sum(size for name, size in sizes.items() if "norm" in name)
    for size in (2, 3):
        for rank, shard in enumerate(shards(path, size)):
            assert shard.read_bytes == norms + (total - norms) // size
            planned = outline_shard(str(path), rank, size, packed=True)
            assert shard.kept_bytes == planned.kept_bytes
            assert shard.peak_bytes < planned.kept_bytes + 4 * 192 * 288 // size + 1
    del shard
    for many_rows, second in ((0, 0), (64, planned.second_bytes)):
        # Else it is a matter of how quick this machine is.
        monkeypatch.setattr(install, "rows_to_unpack", lambda _, found=many_rows: found)
        assert laid_out_bytes(path, 2, 3) == planned.kept_bytes + second


def laid_out_bytes(path: Path, rank: int, size: int) -> int:
    """By how much a rank's tensors grow until it is ready for steps, but for constants."""
    before = allocated()
    shard = shards(path, size)[rank]
    numerics = choose_numerics(FAST, shard.model)
    assert isinstance(numerics, LeanDecoder)
    buffers = sum(b.numel() * b.element_size() for b in shard.model.module.buffers())
    return allocated() - before - buffers


def allocated() -> int:
    """Bytes of all tensors of this process, those of one storage counted once."""
    gc.collect()
    found = {}
    for one in gc.get_objects():
        # Some objects of torch warn of themselves when they are asked what they are.
        if type(one) in (torch.Tensor, torch.nn.Parameter) and not one.is_meta:
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


@pytest.mark.parametrize("size", [2, 3])
def test_several_ranks_say_what_one_says_up_to_rounding_of_packed_products(
    path: Path, size: int
) -> None:
    exact, one = alone(path, linears="dense"), alone(path, forward="auto")
    texts = continued(one)
    with running(path, size) as ranks:
        others = continued(ranks.model)
        whole, split, dense = (
            [logits(model, text) for text in texts] for model in (one, ranks.model, exact)
        )
    # Each product is rounded to bfloat16, here as there: see `test_gguf`.
    assert relative(whole, dense) < ROUNDING
    assert relative(split, dense) < ROUNDING
    assert 0 < relative(split, whole) < ROUNDING
    # Texts part where two tokens are as good as each other, if anywhere.
    same = 0
    for text, other, rows in zip(texts, others, whole, strict=True):
        places = [i for i, pair in enumerate(zip(text, other, strict=True)) if len({*pair}) > 1]
        same += places[0] if places else len(text)
        if places:
            row = rows[places[0] - 1]
            assert row.max() - row[other[places[0]]] < NEAR * row.std()
    assert same > 0.8 * sum(map(len, texts))


def continued(model: Any) -> list[list[int]]:
    """The prompts and twelve greedy tokens after each, all of them in one step at a time."""
    texts = [list(prompt) for prompt in PROMPTS]
    tables = [BlockTable() for _ in texts]
    for table in tables:
        model.pool.grow(table, 32)
    for _ in range(12):
        segments = [
            Segment(text[table.kv_len :], table, 1)
            for text, table in zip(texts, tables, strict=True)
        ]
        rows = [Row(SamplingParams(temperature=0.0), list(text)) for text in texts]
        targets = model.score(segments, Choosing(rows, [], SHAPE.vocabulary)).targets
        for place, (text, table) in enumerate(zip(texts, tables, strict=True)):
            token = targets[place]
            assert token is not None
            table.kv_len = len(text)
            text.append(token)
    for table in tables:
        model.pool.release(table)
    return texts


def logits(model: Any, text: list[int]) -> torch.Tensor:
    """Of every row of a text."""
    table = BlockTable()
    model.pool.grow(table, len(text))
    found: torch.Tensor = model.forward([Segment(text, table, len(text))])
    model.pool.release(table)
    return found


def relative(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """How far they are apart (L2)."""
    pair = torch.cat(found), torch.cat(expected)
    return float((pair[0] - pair[1]).norm() / pair[1].norm())
