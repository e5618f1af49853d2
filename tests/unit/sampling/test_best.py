import pytest
import torch

from outrider.sampling.best import best_tokens


@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 511, 512, 513, 768, 1000, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_it_is_the_lowest_of_the_best(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    scores = torch.randn(40, size, generator=generator).to(dtype)
    # Few values, so that many are equal.
    scores[20:] = scores[20:].round()
    scores[30:, ::3] = -torch.inf
    values, ids = best_tokens(scores)
    expected = scores.max(-1)
    assert torch.equal(values, expected.values)
    assert torch.equal(ids, expected.indices)
    # A row of a wider tensor, as when padding ids are cut off.
    wider = torch.cat([scores, torch.full((40, 7), 99.0, dtype=dtype)], 1)
    assert torch.equal(best_tokens(wider[:, :size])[1], ids)


@pytest.mark.parametrize("size", [5, 512, 700])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_bad_number_anywhere_shows(size: int, value: float) -> None:
    scores = torch.zeros(size + 1, size)
    for place in range(size):
        scores[place, place] = value
    assert best_tokens(scores)[0].isfinite().nonzero().flatten().tolist() == [size]


def test_a_row_without_any_token() -> None:
    scores = torch.full((2, 600), -torch.inf)
    scores[1, 599] = -1e30
    values, ids = best_tokens(scores)
    assert values.isfinite().tolist() == [False, True]
    assert int(ids[1]) == 599
