"""The compiled building blocks against the same in numpy, in double precision."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from numba import njit

from outrider.model.compiled import kernels, vectors
from outrider.model.compiled.pack import padded, panels

Floats = npt.NDArray[np.float32]


def random(*shape: int) -> Floats:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def at(array: npt.NDArray[np.float32] | npt.NDArray[np.int64]) -> int:
    return int(array.ctypes.data)


@njit
def folded(a, b, n):  # type: ignore[no-untyped-def]
    return vectors.dot(a, b, n), vectors.largest(a, n)


@njit
def exponentials(a):  # type: ignore[no-untyped-def]
    return np.array([kernels.exp(x) for x in a])


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 576])
def test_folds_of_every_length(length: int) -> None:
    a, b = random(length), random(length + 1)[1:]
    dot, largest = folded(at(a), at(b), length)
    wide = a.astype(np.float64)
    assert dot == pytest.approx(wide @ b, abs=1e-4)
    assert largest == a.max()


def test_the_largest_may_be_anywhere_and_negative() -> None:
    for place in range(37):
        a = np.full(37, -5, np.float32)
        a[place] = -3
        assert folded(at(a), at(a), 37)[1] == -3


def test_exponentials_are_right_to_the_last_bits() -> None:
    x = np.concatenate([np.linspace(-87, 88, 20_001), [0, -1e-30, 1e-7]]).astype(np.float32)
    np.testing.assert_allclose(exponentials(x), np.exp(x.astype(np.float64)), rtol=3e-7)


def test_exponentials_beyond_the_range_are_those_at_its_end() -> None:
    assert exponentials(np.array([-1e9, -np.inf], np.float32)).max() < 2e-38
    assert np.isfinite(exponentials(np.array([1e9, np.inf], np.float32))).all()


@pytest.mark.parametrize("columns", [1, 16, 31, 32, 33, 100])
@pytest.mark.parametrize("rows", range(1, 20))
def test_products_of_any_number_of_rows(rows: int, columns: int) -> None:
    length = 52
    x, weight = random(rows, length), random(columns, length)
    packed = panels([torch.from_numpy(weight)])
    out = np.full((rows, padded(columns)), np.nan, np.float32)
    arguments = (at(x), length, rows, packed.data_ptr(), length, at(out), out.shape[1])
    kernels.multiply(*arguments, 0, len(packed), 0)
    expected = x.astype(np.float64) @ weight.T
    np.testing.assert_allclose(out[:, :columns], expected, atol=1e-4)
    assert (out[:, columns:] == 0).all()
    kernels.multiply(*arguments, 0, len(packed), 1)
    np.testing.assert_allclose(out[:, :columns], 2 * expected, atol=2e-4)


def test_a_row_of_a_product_has_the_same_bits_among_any_rows() -> None:
    length, columns = 576, 96
    x, weight = random(23, length), random(columns, length)
    packed = panels([torch.from_numpy(weight)])

    def product(rows: Floats) -> Floats:
        rows = np.ascontiguousarray(rows)
        out = np.empty((len(rows), columns), np.float32)
        kernels.multiply(
            at(rows), length, len(rows), packed.data_ptr(), length, at(out), columns,
            0, len(packed), 0,
        )  # fmt: skip
        return out

    whole = product(x)
    for count in range(1, 10):
        for begin in range(len(x) - count + 1):
            assert (product(x[begin : begin + count]) == whole[begin : begin + count]).all()


def test_weights_that_are_joined_keep_their_columns() -> None:
    parts = [random(7, 8), random(40, 8), random(3, 8)]
    packed = panels([torch.from_numpy(part) for part in parts])
    back = packed.transpose(1, 2).reshape(-1, 8).numpy()
    assert (back[:50] == np.concatenate(parts)).all()
    assert (back[50:] == 0).all()


@pytest.mark.parametrize("size", [16, 64, 80])
@pytest.mark.parametrize("members", [1, 3, 8, 15])
def test_attention_of_heads_over_blocks(members: int, size: int) -> None:
    """Scores by block, shares of what is seen, and the mean of the values."""
    tokens, kv_heads = 40, 2
    q, k, v = random(members, size), random(tokens, kv_heads, size), random(tokens, kv_heads, size)
    page_floats = 2 * 16 * kv_heads * size
    pages = np.zeros((3, page_floats), np.float32)
    for token in range(tokens):
        page = at(pages) + token // 16 * page_floats * 4
        kernels.keep(at(k[token]), at(v[token]), page, token % 16, kv_heads, size)
    scores, out = np.full((members, 64), np.nan, np.float32), np.empty((members, size), np.float32)
    for block in range(3):
        keys = at(pages) + (block * page_floats + 1 * size * 16) * 4
        kernels.score(at(q), size, members, keys, size, at(scores) + block * 64, 64)
    wide = q.astype(np.float64) @ k[:, 1].T
    np.testing.assert_allclose(scores[:, :tokens], wide, atol=1e-5)

    begin, end, origin, path = 3, 30, 100, np.array([131, 135], np.int64)
    seen = np.zeros(tokens, bool)
    seen[begin:end] = seen[path - origin] = True
    for row in scores:
        kernels.share(at(row), begin, end, at(path), 2, origin, np.float32(0.3), tokens)
    expected = np.where(seen, np.exp(0.3 * (wide - wide[:, seen].max(1, keepdims=True))), 0)
    np.testing.assert_allclose(scores[:, :tokens], expected, rtol=1e-5)
    assert (scores[:, :tokens][:, ~seen] == 0).all()

    places = np.array(
        [i // 16 * page_floats + ((16 + i % 16) * kv_heads + 1) * size for i in range(tokens)]
    )
    sums = np.empty(8, np.float32)
    kernels.mix(
        at(pages), at(places), at(scores), 64, members, tokens, size, at(out), size, at(sums)
    )
    share = expected / expected.sum(1, keepdims=True)
    np.testing.assert_allclose(out, share @ v[:, 1], atol=2e-6)


def test_norm_rotation_and_gate() -> None:
    size = 20
    x, weight = random(size), random(size + 1)[1:]
    out = np.empty(size, np.float32)
    kernels.normalise(at(x), at(weight), np.float32(1e-5), size, at(out))
    wide = x.astype(np.float64)
    np.testing.assert_allclose(
        out, wide / np.sqrt((wide**2).mean() + 1e-5) * weight, rtol=1e-5, atol=1e-6
    )
    cos, sin, head = random(size + 2)[2:], random(size + 3)[3:], x.copy()
    kernels.rotate(at(head), at(cos), at(sin), size)
    turned = np.concatenate([-wide[size // 2 :], wide[: size // 2]])
    np.testing.assert_allclose(head, wide * cos + turned * sin, atol=1e-5)
    gates, ups = x.copy(), random(size + 4)[4:]
    kernels.gate(at(gates), at(ups), size)
    np.testing.assert_allclose(gates, wide / (1 + np.exp(-wide)) * ups, atol=1e-5)
