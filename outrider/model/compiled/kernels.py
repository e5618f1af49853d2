"""What a layer is made of, as compiled functions over addresses.

Rows of a buffer lie `stride` floats apart; all numbers are float32 unless said otherwise.
"""

import numpy as np
from numba import carray, njit

from outrider.model.blocks import BLOCK_TOKENS
from outrider.model.compiled import vectors
from outrider.model.compiled.vectors import dot, float_of_bits, fma, largest, pointer, total

FLOAT_BYTES = 4
TILE = vectors.tile()
_ROWS = TILE.rows
_COLUMNS = TILE.columns
_BLOCK = BLOCK_TOKENS
# Products of 1 to 8 rows; a tile of fewer rows than that never asks for more.
_p1, _p2, _p3, _p4, _p5, _p6, _p7, _p8 = (
    vectors.make_tile_product(min(rows, TILE.rows), TILE.vectors) for rows in range(1, 9)
)
_mix_4, _mix_1, _mix_one = (vectors.make_mix(count) for count in (4, 1, 0))

_F = np.float32
_LOG2_E = _F(1.44269504088896341)
# ln 2 in two parts, the first of which has few bits, so that products with it are exact.
_LN2_HIGH, _LN2_LOW = _F(0.693359375), _F(-2.12194440e-4)
_LEAST, _MOST = _F(-87.0), _F(88.0)
# exp(r) = 1 + r + r^2 p(r) for |r| <= ln(2) / 2, highest power first: the coefficients of the
# Cephes library (Moshier, expf.c); the relative error is below 2^-22.
_P0, _P1, _P2, _P3, _P4, _P5 = (
    _F(c)
    for c in (
        1.9875691500e-4,
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    )
)
_ONE, _HALF = _F(1.0), _F(0.5)


@njit(inline="always")
def exp(x: float) -> float:
    """e^x, the same bits everywhere; below -87 as at -87, above 88 as at 88."""
    x = min(max(x, _LEAST), _MOST)
    power = np.floor(fma(x, _LOG2_E, _HALF))
    rest = fma(power, -_LN2_HIGH, x)
    rest = fma(power, -_LN2_LOW, rest)
    p = fma(_P0, rest, _P1)
    p = fma(p, rest, _P2)
    p = fma(p, rest, _P3)
    p = fma(p, rest, _P4)
    p = fma(p, rest, _P5)
    p = fma(p, rest * rest, rest) + _ONE
    return p * float_of_bits(np.int32((np.int32(power) + np.int32(127)) << np.int32(23)))


@njit
def multiply(x, x_stride, rows, weight, length, out, out_stride, first, last, add):
    """Rows x [rows, length] times the panels [first, last) of a weight, into `out`.

    With `add` the product is added to what is there.
    """
    for panel in range(first, last):
        weights = weight + panel * length * _COLUMNS * FLOAT_BYTES
        row = 0
        while row < rows:
            count = min(rows - row, _ROWS)
            a = x + row * x_stride * FLOAT_BYTES
            b = out + (row * out_stride + panel * _COLUMNS) * FLOAT_BYTES
            if count == 1:
                _p1(a, x_stride, weights, length, b, out_stride, add)
            elif count == 2:
                _p2(a, x_stride, weights, length, b, out_stride, add)
            elif count == 3:
                _p3(a, x_stride, weights, length, b, out_stride, add)
            elif count == 4:
                _p4(a, x_stride, weights, length, b, out_stride, add)
            elif count == 5:
                _p5(a, x_stride, weights, length, b, out_stride, add)
            elif count == 6:
                _p6(a, x_stride, weights, length, b, out_stride, add)
            elif count == 7:
                _p7(a, x_stride, weights, length, b, out_stride, add)
            else:
                _p8(a, x_stride, weights, length, b, out_stride, add)
            row += count


@njit
def normalise(x, weight, eps, size, out):
    """x / sqrt(mean(x^2) + eps) * weight, of one row or head of `size` numbers."""
    scale = _ONE / np.sqrt(dot(x, x, size) / _F(size) + eps)
    source = carray(pointer(x), size, _F)
    factors = carray(pointer(weight), size, _F)
    target = carray(pointer(out), size, _F)
    for i in range(size):
        target[i] = source[i] * scale * factors[i]


@njit
def rotate(head, cos, sin, size):
    """Turn the halves of a head of `size` numbers against each other (rotary embedding)."""
    half = size // 2
    low, high = carray(pointer(head), half, _F), carray(pointer(head + half * 4), half, _F)
    cos_low, cos_high = carray(pointer(cos), half, _F), carray(pointer(cos + half * 4), half, _F)
    sin_low, sin_high = carray(pointer(sin), half, _F), carray(pointer(sin + half * 4), half, _F)
    for i in range(half):
        a, b = low[i], high[i]
        low[i] = fma(a, cos_low[i], -(b * sin_low[i]))
        high[i] = fma(b, cos_high[i], a * sin_high[i])


@njit
def copy(source, target, size):
    """Copy `size` numbers."""
    a, b = carray(pointer(source), size, _F), carray(pointer(target), size, _F)
    for i in range(size):
        b[i] = a[i]


@njit
def add(values, target, size):
    """Add `size` numbers to others."""
    a, b = carray(pointer(values), size, _F), carray(pointer(target), size, _F)
    for i in range(size):
        b[i] += a[i]


@njit
def gate(gates, ups, size):
    """silu(gate) * up, in the place of the gates."""
    a, b = carray(pointer(gates), size, _F), carray(pointer(ups), size, _F)
    for i in range(size):
        a[i] = a[i] / (_ONE + exp(-a[i])) * b[i]


@njit
def locate(blocks, begin, end, path, path_count, width, places):
    """Where the tokens that a row sees begin in the pages, in floats, as int64; how many.

    They are the tokens [begin, end) of its sequence and then those at the `path_count` indices
    of `path` (int64); `blocks` (int64) are the sequence's blocks, `width` is that of a token.
    """
    count = end - begin
    table = carray(pointer(blocks), 1 + end // _BLOCK, np.int64)
    out = carray(pointer(places), count + path_count, np.int64)
    for i in range(count):
        token = begin + i
        out[i] = (table[token // _BLOCK] * _BLOCK + token % _BLOCK) * width
    indices = carray(pointer(path), path_count, np.int64)
    for i in range(path_count):
        token = indices[i]
        block = carray(pointer(blocks + token // _BLOCK * 8), 1, np.int64)[0]
        out[count + i] = (block * _BLOCK + token % _BLOCK) * width
    return count + path_count


@njit
def attend(q, keys, values, places, count, size, value_size, scaling, scores, out):
    """softmax(q k^T * scaling) v of one head of one row over `count` tokens, in their order.

    `keys` and `values` are those of the head's group in the pages; `scores` has room for
    `count` numbers.
    """
    where = carray(pointer(places), count, np.int64)
    share = carray(pointer(scores), count, _F)
    for i in range(count):
        share[i] = dot(q, keys + where[i] * FLOAT_BYTES, size) * scaling
    most = largest(scores, count)
    for i in range(count):
        share[i] = exp(share[i] - most)
    whole = _ONE / total(scores, count)
    at = 0
    while at < value_size:
        left = value_size - at
        base, target = values + at * FLOAT_BYTES, out + at * FLOAT_BYTES
        if left >= 4 * vectors.LANES:
            _mix_4(base, places, scores, count, target)
            at += 4 * vectors.LANES
        elif left >= vectors.LANES:
            _mix_1(base, places, scores, count, target)
            at += vectors.LANES
        else:
            _mix_one(base, places, scores, count, target)
            at += 1
    mixed = carray(pointer(out), value_size, _F)
    for i in range(value_size):
        mixed[i] = mixed[i] * whole
