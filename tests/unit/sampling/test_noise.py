import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from outrider.messages import SamplingParams
from outrider.sampling.coupled import target_tokens
from outrider.sampling.noise import (
    Stream,
    gumbels,
    gumbels_at,
    key,
    keyed_gumbels,
    uniform,
    uniforms,
)
from outrider.sampling.rejection import KeyedChance
from outrider.sampling.rows import Row
from tests.unit.sampling.splitmix import GAMMA, MASK, reference_mix, seed_of, unmixed


def test_the_hash_is_splitmix64() -> None:
    # The first outputs of SplitMix64 with state 1234567, as its authors publish them.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    state = 1234567
    assert [reference_mix((state + GAMMA * (i + 1)) & MASK) for i in range(3)] == published
    row = uniforms([3], [5], 7)[0]
    for token in range(7):
        bits = reference_mix((key(3, 5) + GAMMA * (token + 1)) & MASK) >> 11
        assert row[token].item() == (bits + 0.5) * 2.0**-53


def test_the_key_is_a_fixed_function() -> None:
    """Pinned: a seed that a user keeps says the same in every release."""
    for seed, position, stream in itertools.product([0, 5, MASK], [0, 1, 4096], Stream):
        state = reference_mix((seed + GAMMA) & MASK)
        state = reference_mix(state ^ position)
        assert key(seed, position, stream) == reference_mix((state + stream * GAMMA) & MASK)
    assert key(3, 5) == key(3, 5, Stream.TARGET)
    assert [stream.value for stream in Stream] == [0, 1, 2, 3]


def test_uniform_on_the_unit_interval() -> None:
    sample = uniforms([11, 2**64 - 1], [0, 9999], 50_000).flatten().numpy()
    assert sample.min() > 0
    assert sample.max() < 1
    assert stats.kstest(sample, "uniform").pvalue > 1e-3


@pytest.mark.parametrize("stream", Stream)
@pytest.mark.parametrize("bits", [0, MASK, MASK - (1 << 11), 1 << 63, 1 << 11])
def test_the_ends_of_the_interval_are_open(bits: int, stream: Stream) -> None:
    """A seed can be made whose bits are all ones; half a step above them would round to 1."""
    seed = seed_of(bits, 9, stream)
    u = uniform(seed, 9, stream)
    assert 0 < u < 1
    assert u == pytest.approx((bits + 0.5) / 2**64, abs=2**-52)
    assert u == uniforms([seed], [9], 3, stream=stream)[0, 0].item()
    assert gumbels([seed], [9], 3, stream=stream).isfinite().all()
    assert KeyedChance(seed).accept(9, 1.0)
    assert not KeyedChance(seed).accept(9, 0.0)


def test_the_lowest_negative_key() -> None:
    """2^63 is the one key whose reading as a signed number is its own negative."""
    state = unmixed((unmixed(1 << 63) - Stream.DRAFT * GAMMA) & MASK)
    seed = (unmixed(state ^ 4) - GAMMA) & MASK
    assert key(seed, 4, Stream.DRAFT) == 1 << 63
    many = uniforms([seed], [4], 2, stream=Stream.DRAFT)
    assert many[0, 0].item() == uniform(seed, 4, Stream.DRAFT)


def test_seeds_without_positions_are_refused() -> None:
    for seeds, positions in [([1], [1, 2]), ([1, 2], [1])]:
        with pytest.raises(ValueError, match="zip"):
            uniforms(seeds, positions, 3)


@pytest.mark.parametrize("bits", [0, MASK])
def test_no_seed_brings_out_a_barred_token(bits: int) -> None:
    seed = seed_of(bits, 1, Stream.TARGET, token=2)
    sampling = SamplingParams(temperature=1.0, seed=seed, banned_ids=(2,))
    (token,) = target_tokens(torch.zeros(1, 4), [Row(sampling, (0,))])
    assert token != 2


def test_one_uniform_is_the_first_of_many() -> None:
    seeds = [0, 1, 77, 2**63, MASK]
    for stream in Stream:
        for position in (0, 3, 100_000):
            many = uniforms(seeds, [position] * 5, 3, stream=stream)
            assert [uniform(seed, position, stream) for seed in seeds] == many[:, 0].tolist()


def assert_independent(left: np.ndarray, right: np.ndarray) -> None:
    # Scale and shift of both are known: r has variance 1/n.
    r = np.corrcoef(left, right)[0, 1]
    assert abs(r) < 4.5 / np.sqrt(len(left))
    pairs = np.histogram2d(left, right, bins=8, range=[[0, 1], [0, 1]])[0]
    assert stats.chisquare(pairs.flatten()).pvalue > 1e-4


@pytest.mark.parametrize(("one", "other"), [*itertools.combinations(Stream, 2)])
def test_streams_are_independent(one: Stream, other: Stream) -> None:
    seeds, positions = [5] * 20_000, range(20_000)
    by_position = [uniforms(seeds, positions, 1, stream=s)[:, 0].numpy() for s in (one, other)]
    assert_independent(*by_position)
    by_token = [uniforms([8], [2], 20_000, stream=s)[0].numpy() for s in (one, other)]
    assert_independent(*by_token)
    # A stream is not another one some places on.
    assert_independent(by_position[0][1:], by_position[1][:-1])
    assert_independent(by_token[0][:-1], by_token[1][1:])


@pytest.mark.parametrize("bit", range(0, 64, 3))
def test_seeds_that_differ_in_one_bit(bit: int) -> None:
    seed = 0x0123456789ABCDEF
    rows = uniforms([seed, seed ^ (1 << bit)], [4, 4], 20_000).numpy()
    assert_independent(rows[0], rows[1])
    flipped = [(key(seed, i) ^ key(seed ^ (1 << bit), i)).bit_count() for i in range(2000)]
    # Half of 64 bits, within 5 standard errors of 4 / sqrt(2000).
    assert abs(np.mean(flipped) - 32) < 0.45


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
        assert_independent(values[:-lag], values[lag:])


def test_seed_and_position_do_not_stand_for_each_other() -> None:
    values = {key(*place) for place in itertools.product(range(60), range(60), Stream)}
    assert len(values) == 60 * 60 * 4


@pytest.mark.parametrize("vocab_size", [1, 7, 1000, 70_000])
def test_a_row_depends_on_neither_batch_nor_threads(vocab_size: int) -> None:
    rows = 40 if vocab_size == 7 else 5
    seeds, positions = [3 + i % 4 for i in range(rows)], [7 * i for i in range(rows)]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = gumbels(seeds, positions, vocab_size)
        torch.set_num_threads(1)
        alone = [
            gumbels([seed], [position], vocab_size)
            for seed, position in zip(seeds, positions, strict=True)
        ]
        backwards = gumbels(seeds[::-1], positions[::-1], vocab_size).flip(0)
        shorter = gumbels(seeds, positions, max(vocab_size // 2, 1))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(together, backwards)
    # Nor on the size of the vocabulary, which a drafter's can fall short of.
    assert torch.equal(together[:, : shorter.shape[1]], shorter)


def test_gumbel_law() -> None:
    sample = gumbels([5], [5], 50_000)[0].numpy()
    assert np.isfinite(sample).all()
    assert stats.kstest(sample, "gumbel_r").pvalue > 1e-3
    u = uniforms([5], [5], 9)[0]
    torch.testing.assert_close(gumbels([5], [5], 9)[0], -(-u.log()).log(), rtol=1e-12, atol=0)


def test_noise_of_a_slice_is_a_slice_of_the_noise() -> None:
    keys = [key(seed, 7) for seed in (1, 2**64 - 1)]
    whole = gumbels([1, 2**64 - 1], [7, 7], 100)
    assert torch.equal(keyed_gumbels(keys, 100), whole)
    begun_later = [(one + 30 * GAMMA) % 2**64 for one in keys]
    torch.testing.assert_close(keyed_gumbels(begun_later, 40), whole[:, 30:70], rtol=1e-14, atol=0)
    tokens = torch.tensor([[3, 99], [0, 41]])
    expected = torch.stack([whole[[0, 1], ids] for ids in tokens])
    torch.testing.assert_close(gumbels_at(keys, tokens), expected, rtol=1e-14, atol=0)
    assert tokens.tolist() == [[3, 99], [0, 41]]
