"""A rank reads its slices, and together the ranks have everything."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.errors import ConfigError
from outrider.model.parallel.group import Limits, RankGroup
from outrider.model.parallel.shards import Shard, load_shard
from tests.support.models import save_model

_SIZE = 4
_NUMBER = 4  # bytes of a float32


def unconnected(rank: int, size: int) -> RankGroup:
    """Loading talks to nobody."""
    return RankGroup(rank, size, None, None, torch.device("cpu"), Limits())


def shards(path: Path, size: int, dtype: str = "float32") -> list[Shard]:
    return [load_shard(str(path), unconnected(rank, size), dtype=dtype) for rank in range(size)]


def weights(shard: Shard) -> dict[str, torch.Tensor]:
    """The weights of a shard by the names they have in the checkpoint."""
    named = shard.model.module.named_parameters()
    return {name.replace(".inner.", "."): parameter.data for name, parameter in named}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"))


def test_slices_of_all_ranks_make_the_model(llama: Path) -> None:
    whole = load_file(llama / "model.safetensors")
    parts = [weights(shard) for shard in shards(llama, 2)]
    assert parts[0].keys() == whole.keys()
    for name, value in whole.items():
        own = [part[name] for part in parts]
        if "norm" in name:
            assert all(torch.equal(part, value) for part in own)
        else:
            along = 1 if "o_proj" in name or "down_proj" in name else 0
            assert torch.equal(torch.cat(own, along), value), name


def test_ranks_that_share_a_kv_head_have_the_same(llama: Path) -> None:
    value = load_file(llama / "model.safetensors")["model.layers.0.self_attn.k_proj.weight"]
    own = [weights(s)["model.layers.0.self_attn.k_proj.weight"] for s in shards(llama, _SIZE)]
    assert torch.equal(own[0], own[1])
    assert torch.equal(torch.cat([own[0], own[2]]), value)


def test_only_the_own_slices_are_read(llama: Path) -> None:
    whole = load_file(llama / "model.safetensors")
    expected = 0
    for name, value in whole.items():
        # Each rank has a whole one of the two KV heads.
        share = 1 if "norm" in name else 2 if "k_proj" in name or "v_proj" in name else _SIZE
        expected += value.numel() * _NUMBER // share
    for shard in shards(llama, _SIZE):
        assert shard.read_bytes == shard.kept_bytes == shard.peak_bytes == expected
        kept = sum(p.numel() * p.element_size() for p in shard.model.module.parameters())
        assert kept == expected


def test_what_belongs_to_others_is_not_touched(llama: Path, tmp_path: Path) -> None:
    for file in llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    poisoned = load_file(llama / "model.safetensors")
    for name, value in poisoned.items():
        if "o_proj" in name or "down_proj" in name:
            value[:, : value.shape[1] // 2] = torch.nan
        elif "norm" not in name:
            value[: len(value) // 2] = torch.nan
    save_file(poisoned, tmp_path / "model.safetensors", {"format": "pt"})
    first, second = (
        [part.isnan() for part in weights(shard).values()] for shard in shards(tmp_path, 2)
    )
    assert not any(bool(part.any()) for part in second)
    assert any(bool(part.all()) for part in first)


def test_weights_of_another_type_take_one_slice_more_while_loading(llama: Path) -> None:
    shard = shards(llama, 2, "bfloat16")[0]
    assert shard.kept_bytes == shard.read_bytes // 2
    assert shard.kept_bytes < shard.peak_bytes < shard.read_bytes
    assert {p.dtype for p in shard.model.module.parameters()} == {torch.bfloat16}


def test_a_tied_head_is_in_memory_once(tmp_path: Path) -> None:
    shard = shards(save_model(tmp_path, "gemma2"), 2)[1]
    untyped: Any = shard.model.module
    assert untyped.lm_head.weight is untyped.get_input_embeddings().weight
    assert (shard.begin, shard.end, len(untyped.lm_head.weight)) == (136, 272, 136)


def test_several_files(llama: Path, tmp_path: Path) -> None:
    whole = load_file(llama / "model.safetensors")
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    names = sorted(whole)
    files = {name: f"model-{i % 2 + 1}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: whole[n] for n in names if files[n] == file}, tmp_path / file)
    index = {"metadata": {}, "weight_map": files}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    expected, found = (weights(shards(path, 2)[1]) for path in (llama, tmp_path))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_checkpoint_that_lacks_a_weight_is_refused(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    with pytest.raises(ConfigError, match="neither"):
        shards(tmp_path, 2)
    whole = load_file(llama / "model.safetensors")
    del whole["model.layers.1.mlp.up_proj.weight"]
    save_file(whole, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"no weight model\.layers\.1\.mlp\.up_proj"):
        shards(tmp_path, 2)
    whole["model.layers.1.mlp.up_proj.weight"] = torch.zeros(64, 16)
    save_file(whole, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"\(64, 16\), the model has \(64, 32\)"):
        shards(tmp_path, 2)
