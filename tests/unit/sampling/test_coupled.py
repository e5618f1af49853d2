import pytest
import torch
from scipy import stats
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from outrider.messages import SamplingParams
from outrider.sampling import coupled
from outrider.sampling.coupled import (
    Targets,
    TargetsFrom,
    choose,
    processed_scores,
    ranked_tokens,
    target_tokens,
    unusable_rows,
)
from outrider.sampling.noise import gumbels
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


def mixed_rows(count: int) -> list[Row]:
    """Greedy, sampled and constrained rows; some at one position of one session, as in a tree."""
    params = [
        SamplingParams(),
        SamplingParams(0.8, seed=7),
        SamplingParams(1.2, top_k=9, seed=7),
        SamplingParams(0.9, top_p=0.8, seed=2**63),
        SamplingParams(0.9, min_p=0.1, seed=1),
        SamplingParams(repetition_penalty=1.5),
        SamplingParams(0.7, seed=7, frequency_penalty=2.0, allowed_ids=tuple(range(3, 40))),
    ]
    return [Row(params[r % 7], [3, 4, 5], [6] * (r // 14), 1) for r in range(count)]


@pytest.mark.parametrize("chunk_tokens", [1, 300, 2000, 10**6])
def test_chunks_and_shared_noise_change_nothing(
    chunk_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(4)) * 3
    logits[11, 8] = torch.nan
    logits[12] = torch.inf
    logits[27] = -torch.inf
    logits[34, 3:40] = -torch.inf  # all that is allowed there
    rows = mixed_rows(50)
    alone = [choose(logits[r : r + 1], [rows[r]]) for r in range(50)]
    dead = [r for r, own in enumerate(alone) if own.dead]
    assert dead == [11, 12, 27, 34]
    monkeypatch.setattr(coupled, "_CHUNK_TOKENS", chunk_tokens)
    together = choose(logits, rows)
    assert together.dead == dead
    for r in range(50):
        assert r in dead or together.token_ids[r] == alone[r].token_ids[0]


def test_targets_are_those_of_all_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(28, 300, generator=torch.Generator().manual_seed(4)) * 3
    logits[[0, 8]] = torch.nan
    rows = mixed_rows(28)
    expected = choose(logits, rows)
    sizes: list[int] = []

    def counted(logits: torch.Tensor, rows: list[Row]) -> coupled.Choices:
        sizes.append(len(rows))
        return choose(logits, rows)

    monkeypatch.setattr(coupled, "choose", counted)
    targets = Targets(logits, rows)
    # The greedy ones and the plain ones before any draft; the others when asked for, once.
    assert sizes == [6]
    for _ in range(2):
        for r, token in enumerate(expected.token_ids):
            assert targets[r] == (None if r in expected.dead else token)
            assert TargetsFrom(targets, 3)[r - 3] == targets[r]
    assert sizes == [6, *[1] * 22]


def test_targets_of_no_rows() -> None:
    Targets(torch.zeros(0, 5), [])


@pytest.mark.parametrize(
    ("chunk_tokens", "sizes"),
    [
        (10, [(4, 0), (1, 0), (1, 1), (1, 1), (3, 1), (3, 1)]),
        (699, [(6, 1), (4, 2), (3, 1)]),
        (10**4, [(13, 4)]),
    ],
)
def test_so_much_is_done_at_once(
    chunk_tokens: int, sizes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """(rows, of how much noise) of each chunk; greedy rows that are free are in none."""
    seen: list[tuple[int, int]] = []
    scores = coupled._scores

    def counted(logits: torch.Tensor, rows: list[Row]) -> torch.Tensor:
        keys = {(row.sampling.seed, row.position) for row in rows if row.sampling.temperature}
        seen.append((len(rows), len(keys)))
        return scores(logits, rows)

    monkeypatch.setattr(coupled, "_scores", counted)
    monkeypatch.setattr(coupled, "_CHUNK_TOKENS", chunk_tokens)
    bound = Row(SamplingParams(banned_ids=(1,)), [1])
    shared = [Row(SamplingParams(1.0, seed=9), [1] * place) for place in (1, 2)]
    alone = [Row(SamplingParams(1.0, seed=seed), [1]) for seed in (3, 4)]
    free = Row(SamplingParams(), [1])
    rows = [alone[0], bound, free, *shared, bound, alone[1], bound, *shared, bound, *shared, bound]
    choose(torch.zeros(len(rows), 300, dtype=torch.float64), rows)
    assert sorted(seen) == sorted(sizes)


def test_noise_is_made_once_for_all_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counted(seeds: list[int], *others: object, **named: object) -> torch.Tensor:
        made.append(len(seeds))
        return gumbels(seeds, *others, **named)  # type: ignore[arg-type]  # passed through

    monkeypatch.setattr(coupled, "gumbels", counted)
    sampling = SamplingParams(0.8, seed=1)
    levels = [Row(sampling, [1], [t] * depth) for depth in range(3) for t in range(8)]
    target_tokens(torch.zeros(24, 300, dtype=torch.float64), levels)
    assert sum(made) == 3


def test_ranked_tokens_are_the_next_best_under_the_same_noise() -> None:
    logits = torch.randn(14, 300, generator=torch.Generator().manual_seed(5)) * 3
    rows = mixed_rows(14)
    ranked = ranked_tokens(logits, rows, 4)
    assert [best[0] for best in ranked] == target_tokens(logits, rows)
    # Barring what was best makes the next one the best.
    for r, best in enumerate(ranked):
        if rows[r].sampling.top_k or rows[r].sampling.top_p < 1 or rows[r].sampling.min_p:
            continue
        assert len(best) == 4
        left = logits[r : r + 1].clone()
        for token in best:
            assert target_tokens(left, [rows[r]]) == [token]
            left[0, token] = -torch.inf


@pytest.mark.parametrize("count", [1, 2, 3])
def test_as_many_are_ranked_as_were_asked_for(count: int) -> None:
    # All equal: the best is the lowest id, what follows may be any.
    ranked = ranked_tokens(torch.zeros(2, 50), [Row(SamplingParams(), [0])] * 2, count)
    assert [(best[0], len(set(best)), len(best)) for best in ranked] == [(0, count, count)] * 2


def test_barred_tokens_are_not_ranked() -> None:
    rows = [Row(SamplingParams(allowed_ids=(5, 2)), [0]), Row(SamplingParams(1.0, top_k=1), [0])]
    logits = torch.arange(8.0).expand(2, -1)
    assert ranked_tokens(logits, rows, 3) == [[5, 2], [7]]
    assert ranked_tokens(torch.zeros(1, 3), [Row(SamplingParams(), [0])], 9) == [[0, 1, 2]]
