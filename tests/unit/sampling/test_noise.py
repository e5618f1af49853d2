import numpy as np
import pytest
import torch
from scipy import stats

from outrider.sampling.noise import gumbels, key, uniforms

GAMMA = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1


def reference_mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def test_the_hash_is_splitmix64() -> None:
    # The first outputs of SplitMix64 with state 1234567, as its authors publish them.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    state = 1234567
    assert [reference_mix((state + GAMMA * (i + 1)) & MASK) for i in range(3)] == published
    row = uniforms([3], [5], 7)[0]
    for token in range(7):
        bits = reference_mix((key(3, 5) + GAMMA * (token + 1)) & MASK) >> 11
        assert row[token].item() == (bits + 0.5) * 2.0**-53


def test_uniform_on_the_unit_interval() -> None:
    sample = uniforms([11, 2**64 - 1], [0, 9999], 50_000).flatten().numpy()
    assert sample.min() > 0
    assert sample.max() < 1
    assert stats.kstest(sample, "uniform").pvalue > 1e-3


@pytest.mark.parametrize("varied", ["seed", "position", "token"])
def test_neighbours_are_independent(varied: str) -> None:
    count = 20_000
    if varied == "seed":
        rows = uniforms(range(count), [17] * count, 1)[:, 0]
    elif varied == "position":
        rows = uniforms([17] * count, range(count), 1)[:, 0]
    else:
        rows = uniforms([17], [17], count)[0]
    values = rows.numpy()
    assert stats.kstest(values, "uniform").pvalue > 1e-3
    for lag in (1, 2, 16):
        pairs = np.histogram2d(values[:-lag], values[lag:], bins=8)[0]
        assert stats.chisquare(pairs.flatten()).pvalue > 1e-3


def test_a_row_does_not_depend_on_its_batch() -> None:
    threads = torch.get_num_threads()
    together = gumbels(list(range(9)), list(range(9)), 1000)
    torch.set_num_threads(1)
    alone = torch.cat([gumbels([row], [row], 1000) for row in range(9)])
    torch.set_num_threads(threads)
    assert torch.equal(together, alone)


def test_gumbel_law() -> None:
    sample = gumbels([5], [5], 50_000)[0].numpy()
    assert np.isfinite(sample).all()
    assert stats.kstest(sample, "gumbel_r").pvalue > 1e-3
