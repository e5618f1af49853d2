from collections import Counter

import pytest
import torch
from scipy import stats

from outrider.messages import SparseDistribution
from outrider.sampling import proposal
from outrider.sampling.noise import Stream, uniform
from outrider.sampling.proposal import draw, quantised
from outrider.sampling.rejection import dense

P = torch.tensor([0.1, 0.4, 0.0, 0.2, 0.3], dtype=torch.float64)
UNIT = 2**24


@pytest.mark.parametrize(
    ("top", "ids"),
    [(1, (1,)), (2, (1, 4)), (3, (1, 4, 3))] + [(top, (1, 4, 3, 0)) for top in (4, 5, 9, 0)],
)
def test_the_likeliest_tokens_renormalised(top: int, ids: tuple[int, ...]) -> None:
    q = quantised(P, top)
    assert q.token_ids == ids
    kept = P[list(ids)] / P[list(ids)].sum()
    assert q.weights == tuple((kept * UNIT).round().long().tolist())
    assert abs(sum(q.weights) - UNIT) <= len(ids) / 2
    torch.testing.assert_close(dense(q, 5)[list(ids)], kept, rtol=0, atol=1e-6)


def test_what_rounds_to_nothing_is_left_out() -> None:
    p = torch.tensor([1.0, 0.4 / UNIT, 0.6 / UNIT, 3.0 / UNIT], dtype=torch.float64)
    assert quantised(p, 0).token_ids == (0, 3, 2)
    assert min(quantised(p, 0).weights) == 1


def test_the_best_token_always_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    # As if the vocabulary were so large that no token reaches half a unit.
    monkeypatch.setattr(proposal, "_UNIT", 1)
    for top in (0, 3, 4):
        q = quantised(torch.tensor([0.22, 0.26, 0.26, 0.26], dtype=torch.float64), top)
        assert (len(q.token_ids), q.weights) == (1, (1,))


def test_a_one_hot_stays_one_hot() -> None:
    p = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    for top in (0, 1, 2):
        assert quantised(p, top) == SparseDistribution((2,), (UNIT,))


def test_equals_are_in_the_order_of_their_ids() -> None:
    flat = torch.full((40,), 1 / 40, dtype=torch.float64)
    assert quantised(flat, 0).token_ids == tuple(range(40))


def test_a_token_is_drawn_by_inversion() -> None:
    q = SparseDistribution((7, 3, 9), (3, 1, 4))
    for seed in range(500):
        u = uniform(seed, 11, Stream.DRAFT)
        assert draw(q, seed, 11) == (7 if u < 3 / 8 else 3 if u < 4 / 8 else 9)


def test_ids_without_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        draw(SparseDistribution((7,), (0, 1)), 0, 0)


def test_the_edges_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    q = SparseDistribution((7, 3, 9), (3, 1, 4))
    for u, token in [(0.0, 7), (0.374, 7), (0.375, 3), (0.499, 3), (0.5, 9), (1 - 2**-53, 9)]:
        monkeypatch.setattr(proposal, "uniform", lambda seed, position, stream, u=u: u)
        assert draw(q, 0, 0) == token
    # Never beyond the end, should a product ever round up to it.
    monkeypatch.setattr(proposal, "uniform", lambda seed, position, stream: 1.0)
    assert draw(q, 0, 0) == 9


def test_the_law_of_a_draw() -> None:
    q = quantised(P, 3)
    counts = Counter(draw(q, seed, 4) for seed in range(8000))
    due = [8000 * weight / sum(q.weights) for weight in q.weights]
    assert stats.chisquare([counts[token] for token in q.token_ids], due).pvalue > 1e-3
