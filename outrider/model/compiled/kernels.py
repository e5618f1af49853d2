"""What a layer is made of, as compiled functions over addresses.

Rows of a buffer lie `stride` floats apart; all numbers are float32 unless said otherwise.
"""

import numpy as np
from numba import carray, njit

from outrider.model.blocks import BLOCK_TOKENS
from outrider.model.compiled import vectors
from outrider.model.compiled.vectors import LANES, dot, float_of_bits, fma, largest, pointer

FLOAT_BYTES = 4
TILE = vectors.tile()
_ROWS = TILE.rows
_COLUMNS = TILE.columns
_BLOCK = BLOCK_TOKENS
# Products of 1 to 8 rows; a tile of fewer rows than that never asks for more.
_p1, _p2, _p3, _p4, _p5, _p6, _p7, _p8 = (
    vectors.make_tile_product(min(rows, TILE.rows), TILE.vectors, vectors.AHEAD)
    for rows in range(1, 9)
)
# Products of attention, of 1, 2, 4 and 8 rows: scores with a block of keys, the sums of shares,
# and values weighted by them.
_HEADS = TILE.heads
_score_1, _score_2, _score_4, _score_8 = (
    vectors.make_tile_product(min(rows, _HEADS), 1) for rows in (1, 2, 4, 8)
)
_sum_1, _sum_2, _sum_4, _sum_8 = (vectors.make_sums(min(rows, _HEADS)) for rows in (1, 2, 4, 8))
_mix_1, _mix_2, _mix_4, _mix_8 = (vectors.make_mix(min(rows, _HEADS), 1) for rows in (1, 2, 4, 8))
_mix_12, _mix_22, _mix_42, _mix_82 = (
    vectors.make_mix(min(rows, _HEADS), 2) for rows in (1, 2, 4, 8)
)

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
_ZERO, _HALF, _ONE = _F(0.0), _F(0.5), _F(1.0)


@njit(inline="always", error_model="numpy")
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


@njit(error_model="numpy")
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


@njit(error_model="numpy")
def normalise(x, weight, eps, size, out):
    """x / sqrt(mean(x^2) + eps) * weight, of one row or head of `size` numbers."""
    scale = _ONE / np.sqrt(dot(x, x, size) / _F(size) + eps)
    source = carray(pointer(x), size, _F)
    factors = carray(pointer(weight), size, _F)
    target = carray(pointer(out), size, _F)
    for i in range(size):
        target[i] = source[i] * scale * factors[i]


@njit(error_model="numpy")
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


@njit(error_model="numpy")
def copy(source, target, size):
    """Copy `size` numbers."""
    a, b = carray(pointer(source), size, _F), carray(pointer(target), size, _F)
    for i in range(size):
        b[i] = a[i]


@njit(error_model="numpy")
def add(values, target, size):
    """Add `size` numbers to others."""
    a, b = carray(pointer(values), size, _F), carray(pointer(target), size, _F)
    for i in range(size):
        b[i] += a[i]


@njit(error_model="numpy")
def gate(gates, ups, size):
    """silu(gate) * up, in the place of the gates."""
    a, b = carray(pointer(gates), size, _F), carray(pointer(ups), size, _F)
    for i in range(size):
        a[i] = a[i] / (_ONE + exp(-a[i])) * b[i]


@njit(error_model="numpy")
def keep(keys, values, page, token, kv_heads, size):
    """Write a row's keys and values [kv_heads, size] as token 0..15 of a block.

    A block has the keys as [kv_heads, size, 16], so that the scores of its tokens are computed
    side by side, and then the values as [16, kv_heads, size].
    """
    length = kv_heads * size
    source = carray(pointer(keys), length, _F)
    target = carray(pointer(page), length * _BLOCK, _F)
    for i in range(length):
        target[i * _BLOCK + token] = source[i]
    copy(values, page + (_BLOCK + token) * length * FLOAT_BYTES, length)


@njit(error_model="numpy")
def _most_at_once(count):
    """The largest of 1, 2, 4 and 8 that is not above `count` or what fits the registers."""
    most = 8 if count >= 8 else 4 if count >= 4 else 2 if count >= 2 else 1
    return min(most, _HEADS)


@njit(error_model="numpy")
def score(queries, queries_stride, count, keys, size, scores, scores_stride):
    """`count` queries [size] times a block of keys [size, 16], into 16 scores for each."""
    done = 0
    while done < count:
        most = _most_at_once(count - done)
        q = queries + done * queries_stride * FLOAT_BYTES
        out = scores + done * scores_stride * FLOAT_BYTES
        if most == 8:
            _score_8(q, queries_stride, keys, size, out, scores_stride, 0)
        elif most == 4:
            _score_4(q, queries_stride, keys, size, out, scores_stride, 0)
        elif most == 2:
            _score_2(q, queries_stride, keys, size, out, scores_stride, 0)
        else:
            _score_1(q, queries_stride, keys, size, out, scores_stride, 0)
        done += most


@njit(error_model="numpy")
def share(scores, begin, end, path, path_count, origin, scaling, until):
    """Turn `until` scores of one head, by token, into e^((score - the largest) * scaling).

    Seen are the tokens [begin, end) and those of `path` (int64), which come after them and are
    counted from `origin` tokens before; the others get 0.
    """
    s = carray(pointer(scores), until, _F)
    seen = carray(pointer(path), path_count, np.int64)
    most = _F(-np.inf)
    if end > begin:
        most = largest(scores + begin * FLOAT_BYTES, end - begin)
    for i in range(path_count):
        most = max(most, s[seen[i] - origin])
    most = most * scaling
    # Loops from 0 become vectors; others would check for negative places.
    for i in range(begin):
        s[i] = _ZERO
    plain = carray(pointer(scores + begin * FLOAT_BYTES), end - begin, _F)
    for i in range(end - begin):
        plain[i] = exp(plain[i] * scaling - most)
    at = 0
    for i in range(end, until):
        if at < path_count and seen[at] - origin == i:
            s[i] = exp(s[i] * scaling - most)
            at += 1
        else:
            s[i] = _ZERO


@njit(error_model="numpy")
def _mix_rows(most, wide, values, places, shares, stride, count, out, out_stride):
    if wide:
        if most == 8:
            _mix_82(values, places, shares, stride, count, out, out_stride)
        elif most == 4:
            _mix_42(values, places, shares, stride, count, out, out_stride)
        elif most == 2:
            _mix_22(values, places, shares, stride, count, out, out_stride)
        else:
            _mix_12(values, places, shares, stride, count, out, out_stride)
    elif most == 8:
        _mix_8(values, places, shares, stride, count, out, out_stride)
    elif most == 4:
        _mix_4(values, places, shares, stride, count, out, out_stride)
    elif most == 2:
        _mix_2(values, places, shares, stride, count, out, out_stride)
    else:
        _mix_1(values, places, shares, stride, count, out, out_stride)


@njit(error_model="numpy")
def mix(values, places, shares, stride, rows, count, size, out, out_stride, sums):
    """Means of values [size], weighted by the shares [rows, count]: out [rows, size].

    The value of token i begins `places[i]` (int64) floats behind `values`; `sums` has room for
    8 numbers.
    """
    done = 0
    totals = carray(pointer(sums), 8, _F)
    while done < rows:
        most = _most_at_once(rows - done)
        weights = shares + done * stride * FLOAT_BYTES
        target = out + done * out_stride * FLOAT_BYTES
        if most == 8:
            _sum_8(weights, stride, count, sums)
        elif most == 4:
            _sum_4(weights, stride, count, sums)
        elif most == 2:
            _sum_2(weights, stride, count, sums)
        else:
            _sum_1(weights, stride, count, sums)
        at = 0
        while at < size:
            wide = size - at >= 2 * LANES
            base, place = values + at * FLOAT_BYTES, target + at * FLOAT_BYTES
            _mix_rows(most, wide, base, places, weights, stride, count, place, out_stride)
            at += 2 * LANES if wide else LANES
        for row in range(most):
            mixed = carray(pointer(target + row * out_stride * FLOAT_BYTES), size, _F)
            factor = _ONE / totals[row]
            for i in range(size):
                mixed[i] = mixed[i] * factor
        done += most
