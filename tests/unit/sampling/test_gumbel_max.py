"""The compiled pass against the rule as torch computes it, which float64 logits always take."""

import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.messages import SamplingParams
from outrider.sampling import coupled, gumbel_max
from outrider.sampling.best import best_tokens
from outrider.sampling.coupled import choose
from outrider.sampling.noise import gumbels
from outrider.sampling.rows import Row
from tests.unit.sampling.splitmix import MASK, seed_of

INF = math.inf


def drawn(logits: torch.Tensor, rows: Sequence[Row]) -> tuple[list[int], list[int]]:
    """The tokens by the pass alone, and the rows that it leaves undecided."""
    best, ids = best_tokens(logits)
    undecided = gumbel_max.draw(logits, rows, range(len(rows)), best, ids)
    return ids.tolist(), undecided


def by_torch(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    choices = choose(logits.double(), rows)
    assert not choices.dead
    return choices.token_ids


def assert_same(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    before = logits.clone()
    assert drawn(logits, rows) == (by_torch(logits, rows), [])
    assert torch.equal(before, logits)


def row(temperature: float, seed: int, position: int = 1) -> Row:
    return Row(SamplingParams(temperature, seed=seed), [0] * position)


TEMPERATURES = st.floats(-6, math.log10(5)).map(lambda power: 10.0**power)
SHAPES: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "normal": lambda x, scale: x * scale,
    # Many equals, of which only the noise differs.
    "ties": lambda x, scale: (x * 2).round() * scale,
    "equal": lambda x, scale: torch.full_like(x, scale),
    "one high": lambda x, scale: x + torch.where(x == x.amax(-1, keepdim=True), 4 * scale, 0.0),
    # Also what float32 has no room for the difference of.
    "extreme": lambda x, scale: (x * 1e38 * scale).clamp(-3.4e38, 3.4e38),
    "tiny": lambda x, scale: x * scale * 1e-40,
}


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_the_token_is_the_one_that_torch_finds(data: st.DataObject) -> None:
    count, vocab = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 2100))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    x = torch.randn(count, vocab + 3, generator=generator)
    shape = data.draw(st.sampled_from(list(SHAPES)))
    x = SHAPES[shape](x, data.draw(st.sampled_from([0.01, 1.0, 3.0, 20.0])))
    if data.draw(st.booleans()):
        barred = torch.rand(x.shape, generator=generator) < data.draw(st.floats(0, 1))
        barred[:, data.draw(st.integers(0, vocab - 1))] = False
        x[barred] = -INF
    # Rows of a wider table, as the logits of a compiled forward are.
    logits = x[:, data.draw(st.integers(0, 3)) :][:, :vocab]
    logits[:, data.draw(st.integers(0, vocab - 1))].clamp_(min=-1.0)
    seeds, positions = st.integers(0, MASK), st.integers(0, 3000)
    rows = [
        row(data.draw(TEMPERATURES), data.draw(seeds), data.draw(positions)) for _ in range(count)
    ]
    assert_same(logits, rows)


@pytest.mark.parametrize("temperature", [1e-3, 0.8, 5.0])
@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0])
def test_a_whole_vocabulary(temperature: float, scale: float) -> None:
    logits = torch.randn(24, 49_152, generator=torch.Generator().manual_seed(1)) * scale
    assert_same(logits, [row(temperature, 3 + r % 5, r // 2) for r in range(24)])


@given(
    far=st.integers(0, 52),
    low=st.integers(0, MASK),
    token=st.sampled_from([1, 2, 511, 512, 513, 1023, 1024, 1400]),
    above=st.booleans(),
    temperature=st.floats(0.1, 3.0),
    top=st.sampled_from([0.0, -3.0, 18.5]),
    top_token=st.sampled_from([0, 600]),
)
@settings(max_examples=300, deadline=None)
def test_tokens_that_just_win_and_just_dont(
    far: int,
    low: int,
    token: int,
    above: bool,
    temperature: float,
    top: float,
    top_token: int,
) -> None:
    """One token with a u of any closeness to 1, and a score that makes up for it within 1e-5."""
    seed = seed_of(MASK ^ (low >> far), 1, token=token)
    noise = gumbels([seed], [1], 1401)[0]
    logits = torch.full((1, 1401), -INF)
    logits[0, top_token] = top
    less = float(noise[token] - noise[top_token]) + (1e-5 if above else -1e-5)
    logits[0, token] = min(top - less * temperature, top)
    assert_same(logits, [row(temperature, seed)])


@pytest.mark.parametrize("bits", [0, MASK, MASK - (1 << 11), MASK >> 1, 1 << 11])
def test_the_ends_of_the_interval(bits: int) -> None:
    seed = seed_of(bits, 1, token=2)
    for low in (0.0, -30.0, -36.0, -40.0, -45.0):
        assert_same(torch.tensor([[0.0, low, low, -1.0]]), [row(1.0, seed)])


def nearly_tied(seed: int, gap: float) -> tuple[torch.Tensor, Row]:
    """Two tokens: the second has `gap` more than the first, noise and all."""
    noise = gumbels([seed], [1], 2)[0]
    ahead = float(noise[1] - noise[0]) - gap
    logits = torch.tensor([[1.0, 0.0], [0.0, 1.0]][ahead < 0])
    return logits[None], row(1 / abs(ahead), seed)


def test_what_logarithms_could_change_is_left_to_torch() -> None:
    for seed in range(100):
        for gap in (0.0, 3e-13, -3e-13):
            logits, tied = nearly_tied(seed, gap)
            _, ids = best_tokens(logits)
            assert drawn(logits, [tied]) == (ids.tolist(), [0])
            assert choose(logits, [tied]) == choose(logits.double(), [tied])
        for gap in (1e-11, -1e-11):
            logits, apart = nearly_tied(seed, gap)
            assert drawn(logits, [apart]) == ([int(gap > 0)], [])


@pytest.mark.parametrize(
    "changed",
    [
        {"temperature": 0.0},
        {"temperature": 1e-30},
        {"temperature": 1e30},
        {"top_k": 3},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"logit_bias": ((1, 2.0),)},
        {"frequency_penalty": 0.5},
        {"banned_ids": (1,)},
    ],
)
def test_other_rows_are_not_plain(changed: dict[str, object]) -> None:
    assert gumbel_max.is_plain(SamplingParams(0.5))
    sampling = replace(SamplingParams(0.5, seed=9), **changed)  # type: ignore[arg-type]  # one each
    assert not gumbel_max.is_plain(sampling)
    logits = torch.randn(1, 60, generator=torch.Generator().manual_seed(3))
    rows = [Row(sampling, [2, 3], (), 1)]
    assert choose(logits, rows) == choose(logits.double(), rows)


def test_which_logits_the_pass_reads() -> None:
    logits = torch.zeros(4, 6)
    assert gumbel_max.suits(logits)
    assert gumbel_max.suits(logits[:, 1:4])
    assert gumbel_max.suits(logits[:, :1])
    assert gumbel_max.suits(logits[:1].expand(3, -1))
    for other in (logits.double(), logits.bfloat16(), logits.T, logits[:, :0], logits.to("meta")):
        assert not gumbel_max.suits(other)


def test_torch_is_asked_for_what_is_undecided_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Sequence[Row]] = []
    scores = coupled._scores

    def counted(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
        asked.append(rows)
        return scores(logits, rows)

    monkeypatch.setattr(coupled, "_scores", counted)
    tie, tied = nearly_tied(3, 0.0)
    logits = torch.cat([tie, torch.zeros(4, 2)])
    logits[1, 1], logits[2, 0], logits[4] = math.nan, INF, -INF
    rows = [tied, row(0.7, 1), row(0.7, 2), row(0.7, 3), row(0.7, 4)]
    found = choose(logits, rows)
    assert asked == [[tied]]
    assert found.dead == [1, 2, 4]
    assert [found.token_ids[r] for r in (0, 3)] == by_torch(logits[[0, 3]], [rows[0], rows[3]])


def test_the_compiler_is_loaded_when_it_is_needed() -> None:
    program = """
import sys, torch
from outrider.messages import SamplingParams
from outrider.sampling import gumbel_max
from outrider.sampling.coupled import choose
from outrider.sampling.rows import Row
for sampling in (SamplingParams(), SamplingParams(banned_ids=(1,)), SamplingParams(1.0, top_k=1)):
    choose(torch.zeros(1, 3), [Row(sampling, [0])])
assert "numba" not in sys.modules
gumbel_max.prepare()
assert "numba" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=110)
