"""Tokens of logits that are cut in slices: those that the whole rows lead to."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.messages import SamplingParams
from outrider.model.parallel.choosing import candidates, chosen, sorted_rows
from outrider.model.parallel.plan import vocabulary_range
from outrider.sampling.coupled import Choices, choose
from outrider.sampling.rows import Row

GREEDY = SamplingParams(temperature=0.0)


def spread(logits: torch.Tensor, rows: list[Row], ranks: int, token_count: int) -> Choices:
    """What `ranks` ranks choose together, in the order of rows."""
    wanted = sorted_rows(rows, (), token_count)
    assert not wanted.whole
    parts = []
    for rank in range(ranks):
        begin, end = vocabulary_range(rank, ranks, logits.shape[1])
        parts.append(candidates(logits[:, begin:end], begin, wanted))
    choices, places = chosen(parts, wanted), wanted.chosen_rows
    by_row = dict(zip(places, choices.token_ids, strict=True))
    return Choices([by_row[r] for r in range(len(rows))], sorted(places[i] for i in choices.dead))


def row(seed: int, position: int, temperature: float) -> Row:
    return Row(SamplingParams(temperature=temperature, seed=seed), [1] * position)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_greedy_and_drawn_tokens_are_those_of_whole_rows(ranks: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(ranks)
    logits = (torch.randn(200, 1000, generator=generator) * 3).to(dtype)
    rows = [
        row(2**64 - 1 - r, 3 + r % 7, (0.0, 1e-3, 0.6, 1.0, 3.0)[r % 5]) for r in range(len(logits))
    ]
    expected = choose(logits[:, :990].float(), rows)
    assert spread(logits, rows, ranks, 990) == expected
    assert len({*expected.token_ids}) > 100


@settings(max_examples=50, deadline=None)
@given(
    st.integers(2, 4),
    st.lists(st.sampled_from([0.0, 1.0, 2.0, 2.0, -torch.inf]), min_size=12, max_size=12),
)
def test_of_equals_the_lowest_id(ranks: int, values: list[float]) -> None:
    logits = torch.tensor([values])
    assert spread(logits, [Row(GREEDY, [1])], ranks, 12) == choose(logits, [Row(GREEDY, [1])])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("place", [0, 7, 11])
def test_one_bad_logit_anywhere_makes_a_dead_row(
    bad: float, temperature: float, place: int
) -> None:
    logits = torch.zeros(3, 12)
    logits[1, place] = bad
    rows = [row(r, 1, temperature) for r in range(3)]
    found = spread(logits, rows, 3, 12)
    assert found.dead == [1]
    healthy = choose(logits, rows)
    assert [found.token_ids[r] for r in (0, 2)] == [healthy.token_ids[r] for r in (0, 2)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_rank_without_a_finite_logit_has_no_say(temperature: float) -> None:
    logits = torch.full((1, 12), -torch.inf)
    logits[0, 9] = -1e30
    assert spread(logits, [row(1, 1, temperature)], 3, 12) == Choices([9], [])
    assert spread(torch.full((1, 12), -torch.inf), [row(1, 1, temperature)], 3, 12).dead == [0]


def test_padding_is_never_chosen_nor_looked_at() -> None:
    logits = torch.zeros(1, 12)
    logits[0, 3:] = torch.nan
    assert spread(logits, [Row(GREEDY, [1])], 4, 3) == Choices([0], [])


def test_rows_with_processors_are_wanted_whole() -> None:
    rows = [
        Row(GREEDY, [1]),
        Row(SamplingParams(temperature=1.0, top_p=0.9), [1]),
        Row(SamplingParams(temperature=1.0), [1]),
        Row(GREEDY, [1]),
    ]
    wanted = sorted_rows(rows, [3], 100)
    assert (wanted.whole, wanted.greedy) == ([1, 3], [0])
    assert [drawn.row for drawn in wanted.drawn] == [2]
