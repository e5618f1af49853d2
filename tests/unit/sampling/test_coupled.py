import pytest
import torch
from scipy import stats
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from outrider.messages import SamplingParams
from outrider.sampling.coupled import processed_scores, target_tokens, unusable_rows
from outrider.sampling.rows import Row


def draws(logits: torch.Tensor, params: dict[str, float], count: int) -> list[int]:
    settings = [SamplingParams(seed=seed, **params) for seed in range(count)]  # type: ignore[arg-type]
    return target_tokens(logits.expand(count, -1), [Row(s, [0, 0, 0]) for s in settings])


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.3, 5, 1.0), (1.0, 0, 0.8), (0.6, 20, 0.9), (2.0, 1, 0.5)],
)
def test_processed_distribution_is_that_of_transformers(
    temperature: float, top_k: int, top_p: float
) -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1)) * 3
    expected = TemperatureLogitsWarper(temperature)(None, logits.double())
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    rows = [Row(SamplingParams(temperature, top_k, top_p), [0])] * 6
    actual = processed_scores(logits, rows)
    torch.testing.assert_close(actual.softmax(-1), expected.softmax(-1), rtol=1e-9, atol=1e-12)
    assert torch.equal(actual.isinf(), expected.isinf())


def test_case_8_the_law_is_the_processed_distribution() -> None:
    logits = torch.tensor([1.0, 2.0, 0.5, 1.7, -1.0])
    tokens = draws(logits, {"temperature": 1.0, "top_k": 2}, 50_000)
    p = torch.tensor([2.0, 1.7]).softmax(-1)
    counts = [tokens.count(1), tokens.count(3)]
    assert sum(counts) == 50_000
    expected = [50_000 * float(mass) for mass in p]
    assert stats.chisquare(counts, expected).pvalue > 1e-3


def test_the_law_of_temperature() -> None:
    logits = torch.tensor([0.3, -0.2, 1.1])
    tokens = draws(logits, {"temperature": 0.5}, 50_000)
    p = (logits.double() / 0.5).softmax(-1)
    counts = [tokens.count(v) for v in range(3)]
    assert stats.chisquare(counts, (p * 50_000).tolist()).pvalue > 1e-3


def test_case_11_a_flat_distribution_gives_every_token() -> None:
    assert set(draws(torch.zeros(3), {"temperature": 1.0}, 300)) == {0, 1, 2}


@pytest.mark.parametrize("temperature", [1e-5, 1e-6])
def test_case_12_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = torch.randn(40, 100, generator=torch.Generator().manual_seed(0)) * 20
    rows = [Row(SamplingParams(temperature, seed=seed), [0] * seed) for seed in range(40)]
    assert target_tokens(logits, rows) == logits.argmax(-1).tolist()
    assert not processed_scores(logits, rows).isnan().any()


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(8, 300, generator=torch.Generator().manual_seed(2))
    params = [SamplingParams(0.9 if r % 2 else 0.0, 40, 0.9, seed=r) for r in range(8)]
    rows = [Row(params[r], [0] * r) for r in range(8)]
    together = target_tokens(logits, rows)
    alone = [target_tokens(logits[r : r + 1], [rows[r]])[0] for r in range(8)]
    assert together == alone


@pytest.mark.parametrize("vocab_size", [3, 40, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_equal_scores_the_lowest_id_is_best_with_and_without_processors(
    vocab_size: int, dtype: torch.dtype
) -> None:
    logits = torch.zeros(3, vocab_size, dtype=dtype)
    logits[1, 1:] = 0.1
    logits[2, -2:] = 0.1
    best = [0, 1, vocab_size - 2]
    bans = SamplingParams(banned_ids=(vocab_size,), frequency_penalty=0.5)
    for sampling in (SamplingParams(), bans):
        assert target_tokens(logits, [Row(sampling, (0,), (), 1)] * 3) == best
        for r in range(3):
            assert target_tokens(logits[r : r + 1], [Row(sampling, (0,), (), 1)]) == [best[r]]


def test_unusable_rows() -> None:
    logits = torch.zeros(5, 4)
    logits[1, 2] = torch.nan
    logits[2, 0] = torch.inf
    logits[3] = -torch.inf
    logits[4, 1] = -torch.inf
    assert unusable_rows(logits) == [1, 2, 3]
