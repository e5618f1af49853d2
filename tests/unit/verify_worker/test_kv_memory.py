"""How much memory the KV gets."""

import pytest
import torch

from outrider.errors import ConfigError
from outrider.memory import available_bytes
from verify_worker import kv_memory
from verify_worker.config import Settings
from verify_worker.kv_memory import budget_bytes, pool_blocks, statement

CPU = torch.device("cpu")
MIB = 2**20


def settings(kv_memory: str) -> Settings:
    return Settings(model="m", redis_url="redis://r", kv_memory=kv_memory)


def test_a_size_is_taken_as_it_is() -> None:
    assert budget_bytes("64MiB", CPU) == 64 * MIB
    assert budget_bytes("64MiB", torch.device("cuda")) == 64 * MIB


def test_auto_leaves_memory_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < budget_bytes("auto", CPU) < available_bytes()
    monkeypatch.setattr(kv_memory, "available_bytes", lambda: 1000 * MIB)
    assert budget_bytes("auto", CPU) == 500 * MIB
    monkeypatch.setattr(kv_memory, "available_bytes", lambda: 10**15)
    assert budget_bytes("auto", CPU) == kv_memory.CPU_MOST


def test_auto_on_a_gpu_asks_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000 * MIB, 2000 * MIB))
    assert budget_bytes("auto", torch.device("cuda")) == int(kv_memory.CUDA_SHARE * 1000 * MIB)


def test_auto_is_refused_where_nothing_tells() -> None:
    with pytest.raises(ConfigError, match="name a size"):
        budget_bytes("auto", torch.device("meta"))


def test_no_more_blocks_than_sessions_can_use() -> None:
    assert pool_blocks(100 * MIB, MIB, 1000, "100MiB") == 100
    assert pool_blocks(100 * MIB, MIB, 10, "100MiB") == 10


def test_a_pool_without_a_block_is_refused_with_figures() -> None:
    with pytest.raises(ConfigError, match=r"--kv-memory 1MiB gives 1\.0 MiB.*takes 2\.0 MiB"):
        pool_blocks(MIB, 2 * MIB, 10, "1MiB")


def test_the_statement_says_how_many_full_contexts_fit() -> None:
    assert statement(96, MIB, 16, 1024) == {
        "kv_memory": "96.0 MiB",
        "kv_blocks": 96,
        "kv_tokens": 1536,
        "full_contexts": 1.5,
    }


@pytest.mark.parametrize("kv_memory", ["1 sack", "0", ""])
def test_settings_refuse_what_is_no_size(kv_memory: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        settings(kv_memory)


def test_settings_take_sizes_and_auto() -> None:
    assert settings("auto").kv_memory == "auto"
    assert settings("2GiB").kv_memory == "2GiB"
