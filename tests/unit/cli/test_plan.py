"""`outrider plan`: what is told is what a config.json leads to."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from transformers import LlamaConfig

from outrider.cli import main

# Llama 3 70B.
LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD, VOCABULARY = 80, 8192, 28672, 64, 8, 128, 128256


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("big")
    config: Any = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=VOCABULARY,
        max_position_embeddings=8192,
    )
    config.save_pretrained(where)
    return where


def plan(model: Path, *flags: str) -> Result:
    return CliRunner().invoke(main, ["plan", "--model", str(model), *flags])


@pytest.mark.parametrize("size", [4, 8])
def test_a_70b_model_without_its_weights(big: Path, size: int) -> None:
    flags = ("--tensor-parallel-size", str(size), "--gpu-memory", "80GiB", "--json")
    found = json.loads(plan(big, *flags).stdout)
    matrices = LAYERS * (2 * HIDDEN * HEADS * HEAD + 2 * HIDDEN * KV_HEADS * HEAD)
    matrices += LAYERS * 3 * HIDDEN * INNER + 2 * VOCABULARY * HIDDEN
    weights = 2 * (matrices // size + (2 * LAYERS + 1) * HIDDEN)  # norms are everywhere
    block = 2 * 16 * LAYERS * 2 * KV_HEADS * HEAD // size
    kv = int(0.85 * (80 * 2**30 - weights))
    expected = {"weights_bytes": weights, "block_bytes": block, "kv_bytes": kv}
    assert found["ranks"] == [{"rank": rank, **expected} for rank in range(size)]
    assert found["kv_blocks"] == kv // block
    assert found["sessions"] == kv // block // 256
    assert found["whole_contexts"] == kv // block // 512


def test_tables_and_refusals(big: Path) -> None:
    told = plan(big, "--tensor-parallel-size", "4", "--gpu-memory", "80GiB")
    assert told.exit_code == 0
    assert "rank 3: weights 32.9 GiB, KV 40.1 GiB" in told.stdout
    refused = plan(big, "--tensor-parallel-size", "1", "--gpu-memory", "80GiB")
    assert refused.exit_code == 1
    assert "its weights take 131.4 GiB of 80.0 GiB in bfloat16" in refused.stderr
    refused = plan(big, "--tensor-parallel-size", "3")
    assert "64 heads, 8 KV heads" in refused.stderr
