"""`outrider plan`: what is told is what a config.json leads to."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from transformers import LlamaConfig

from outrider.cli import main
from tests.support.gguf_files import LINEARS, Shape, write_llama

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
    expected = {
        "weights_bytes": weights,
        "block_bytes": block,
        "kv_bytes": kv,
        "second_bytes": 0,
    }
    assert found["ranks"] == [{"rank": rank, **expected} for rank in range(size)]
    assert found["kv_blocks"] == kv // block
    assert found["sessions"] == kv // block // 256
    assert found["whole_contexts"] == kv // block // 512


def test_a_gguf_file_is_packed_on_a_cpu_and_unpacked_on_a_gpu(tmp_path: Path) -> None:
    kinds = {"token_embd": "Q8_0", **dict.fromkeys(LINEARS.values(), "Q4_0")}
    path = write_llama(tmp_path / "tiny.gguf", kinds, Shape(inner=128))
    flags = ("--tensor-parallel-size", "2", "--dtype", "float32")
    packed, unpacked = (
        json.loads(plan(path, *flags, "--device", device, "--json").stdout)["ranks"][0]
        for device in ("cpu", "cuda")
    )
    norms, embedding = 5 * 64 * 4, 48 * 64 * 4
    # A layer's matrices: queries and output, keys and values, three of the MLP; and the head.
    four, eight = 2 * (2 * 32 * 64 + 2 * 16 * 64 + 3 * 64 * 64), 48 * 64
    assert unpacked["weights_bytes"] == norms + embedding + 4 * four
    # Half a byte and an eighth for scales; of 8 bits both twice.
    assert packed["weights_bytes"] == norms + embedding + (four + 2 * eight) * 5 // 8
    assert packed["second_bytes"] == (four + eight) * 5 // 4
    assert unpacked["second_bytes"] == 0
    told = plan(path, *flags, "--device", "cpu").stdout
    assert "at most 48.8 KiB more for packed weights" in told


def test_tables_and_refusals(big: Path) -> None:
    told = plan(big, "--tensor-parallel-size", "4", "--gpu-memory", "80GiB")
    assert told.exit_code == 0
    assert "rank 3: weights 32.9 GiB, KV 40.1 GiB" in told.stdout
    refused = plan(big, "--tensor-parallel-size", "1", "--gpu-memory", "80GiB")
    assert refused.exit_code == 1
    assert "its weights take 131.4 GiB of 80.0 GiB in bfloat16" in refused.stderr
    refused = plan(big, "--tensor-parallel-size", "3")
    assert "64 heads, 8 KV heads" in refused.stderr
