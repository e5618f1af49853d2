from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BloomConfig,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    Qwen3NextConfig,
    T5Config,
)

from outrider.errors import ConfigError, UnsupportedModelError
from outrider.model.blocks import BlockTable
from outrider.model.describe import describe
from outrider.model.loading import check_supported, load_model
from outrider.model.paged import PagedModel, Segment
from tests.support.models import CONTEXT, EOS, FAMILIES, VOCABULARY, WINDOW, save_model


def own_logits(path: Path, tokens: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([tokens])).logits[0]
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_drafts_and_neighbours_do_not_change_logits(family: str, tmp_path: Path) -> None:
    path = save_model(tmp_path, family)
    model = PagedModel(load_model(str(path)), 40)
    generator = torch.Generator().manual_seed(3)
    # Past the sliding window, so that it matters.
    length = 2 * WINDOW + 9
    tokens = torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()
    expected = own_logits(path, tokens)
    table, other = BlockTable(), BlockTable()
    model.pool.grow(other, 3)
    model.pool.grow(table, 20)
    model.pool.grow(other, 60)
    model.pool.grow(table, length)
    rows = []
    for begin, end in [(0, 7), (7, 23), (23, 24), (24, 29), (29, length)]:
        table.kv_len = begin
        if end + 3 < length:
            # A draft that is rejected: written, never counted.
            model.forward([Segment([1, 2, 3], table, 3)])
        neighbour = Segment([9, 8, 7], other, 2)
        logits = model.forward([neighbour, Segment(tokens[begin:end], table, end - begin)])
        assert logits.shape == (2 + end - begin, VOCABULARY)
        rows.append(logits[2:])
        other.kv_len += 3
    torch.testing.assert_close(torch.cat(rows), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(torch.cat(rows).argmax(-1), expected.argmax(-1))


def test_no_logits_are_computed_for_rows_that_need_none(tmp_path: Path) -> None:
    model = PagedModel(load_model(str(save_model(tmp_path))), 4)
    table = BlockTable()
    model.pool.grow(table, 5)
    assert model.forward([Segment([1, 2, 3, 4, 5], table, 0)]).shape == (0, VOCABULARY)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (T5Config(), "encoder-decoder"),
        (MambaConfig(), "can't be rolled back"),
        (Qwen3NextConfig(), "linear_attention"),
        (
            LlamaConfig(
                max_position_embeddings=64,
                rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            ),
            "longest sequence in the batch",
        ),
    ],
)
def test_what_cannot_be_exact_is_refused_with_the_reason(config: object, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        check_supported(config)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4, seq_length=64), "bloom"),
        (
            GptOssConfig(
                vocab_size=64,
                hidden_size=32,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
                num_local_experts=2,
                num_experts_per_tok=1,
                max_position_embeddings=64,
                eos_token_id=1,
                pad_token_id=1,
                rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            ),
            "s_aux",
        ),
    ],
)
def test_attention_that_is_not_ours_is_refused(
    config: AutoConfig, reason: str, tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=reason):
        PagedModel(load_model(str(tmp_path)), 4)


def test_a_path_without_a_model_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model at .*config\.json"):
        load_model(str(tmp_path / "nothing"))


def test_description(tmp_path: Path) -> None:
    first = describe(str(save_model(tmp_path / "a")))
    same = describe(str(save_model(tmp_path / "b")))
    other = describe(str(save_model(tmp_path / "c", seed=1)))
    assert (first.context_len, first.vocab_size) == (CONTEXT, VOCABULARY)
    assert first.stop_ids == {EOS}
    assert first.fingerprint == same.fingerprint != other.fingerprint
    assert load_model(str(tmp_path / "a")).fingerprint == first.fingerprint
