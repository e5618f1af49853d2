"""argmax_v( s[v] + gumbel(v) ) in one compiled pass, without the noise of all tokens.

The plain case of the coupled rule on a CPU: float32 logits and a temperature, no processor.
The token is the one that `processors` and `noise` lead to. Scores and the hash are computed as
there, to the bit. Logarithms are not: two libraries may differ in the last bit. They stay the
ones of torch, so where the two best tokens are closer than that the pass says nothing.

Most tokens are never looked at twice. With m the best score plus noise so far,

    s + g > m  <=>  -ln u < exp(s - m)  =>  1 - u < exp(s - m)       g = -ln(-ln u)
    that is    log2(1 - u) < (s - m) / ln 2

The left is bounded from below by the bits of 1 - u as a float32, read as an integer: its
exponent and mantissa are log2 with straight lines between the powers of 2. Numbers of 32 bits
do for that; what is left are a handful of tokens for which logarithms are computed.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.messages import SamplingParams
from outrider.sampling import noise
from outrider.sampling.processors import constrains
from outrider.sampling.rows import Row

# Tokens whose bounds are computed before the best so far is looked at again.
_BLOCK = 512
# Scores and noise of what may win are below 64. So the last bits of logarithms change sums by
# less than 1e-13, and those of the bounds, which are float32, by less than 1e-4.
_CLOSE = 1e-12
_SLACK = 1e-3
# Beyond these temperatures a bound has no room in float32.
_COLDEST, _HOTTEST = 1e-30, 1e30

_LOG2_E = 1.4426950408889634
# The integer of a float32's bits is about (log2 + 127) * 2^23; 1 - u is counted in 2^-32.
_BIAS = 127.0 + 32.0
_STEP = np.float32(2.0**23)
_ULP = 2.0**-53
_BELOW_ONE = 1.0 - 2.0**-53
_UNCLEAR = -1


def suits(logits: torch.Tensor) -> bool:
    """Whether the pass reads such logits [R, V]: float32 on a CPU, a row without gaps."""
    plain = logits.device.type == "cpu" and logits.dtype == torch.float32
    return plain and logits.stride(1) == 1 and logits.shape[1] > 0


def is_plain(sampling: SamplingParams) -> bool:
    """Whether the token is drawn with a temperature and nothing else."""
    return (
        _COLDEST < sampling.temperature < _HOTTEST
        and not sampling.top_k
        and sampling.top_p >= 1.0
        and sampling.min_p <= 0
        and not constrains(sampling)
    )


def draw(
    logits: torch.Tensor,
    rows: Sequence[Row],
    wanted: Sequence[int],
    best: torch.Tensor,
    ids: torch.Tensor,
) -> list[int]:
    """Put the token that is drawn on each wanted row into `ids`.

    Args:
        logits: float32 [R, V] that `suits`.
        rows: R rows.
        wanted: rows that are plain and whose logits are finite but for -inf.
        best: the best logit of each row, float32 [R].
        ids: the token that has it, int64 [R].

    Returns:
        The wanted rows whose two best are too close to tell; their ids stay.
    """
    some = [rows[r] for r in wanted]
    keys = [noise.key(row.sampling.seed, row.position) for row in some]
    temperatures = [row.sampling.temperature for row in some]
    return draw_keyed(logits, wanted, keys, temperatures, best, ids)


def draw_keyed(
    logits: torch.Tensor,
    wanted: Sequence[int],
    keys: Sequence[int],
    temperatures: Sequence[float],
    best: torch.Tensor,
    ids: torch.Tensor,
) -> list[int]:
    """`draw`, for rows of which the keys of their noise and their temperatures are known."""
    if not wanted:
        return []
    places = np.array(wanted)
    size, stride = logits.shape[1], logits.stride(0)
    tokens = ids.numpy()[places]
    _compiled()(
        logits.as_strided(((len(logits) - 1) * stride + size,), (1,)).numpy(),
        places * stride,
        size,
        best.numpy()[places],
        np.array(temperatures, dtype=np.float64),
        np.array(keys, dtype=np.uint64),
        np.uint64(noise.GAMMA),
        np.uint64(noise.MIX_1),
        np.uint64(noise.MIX_2),
        tokens,
    )
    clear = tokens != _UNCLEAR
    ids.numpy()[places[clear]] = tokens[clear]
    undecided: list[int] = places[~clear].tolist()
    return undecided


def prepare() -> None:
    """Compile the pass now, so that no step waits for it.

    Takes some seconds the first time, on each kind of processor; the result is kept beside
    this file, or in the user's cache.
    """
    _compiled()


@cache
def _compiled() -> Callable[..., None]:
    # Not at the top: the compiler takes long to import, and greedy tokens don't need it.
    from numba import njit

    signature = (
        "void(float32[::1], int64[::1], int64, float32[::1], float64[::1], "
        "uint64[::1], uint64, uint64, uint64, int64[::1])"
    )
    kept = njit(signature, nogil=True, error_model="numpy", cache=True)
    try:
        compiled: Callable[..., None] = kept(_draw_rows)
    except RuntimeError:  # there is no place to keep it
        compiled = njit(signature, nogil=True, error_model="numpy")(_draw_rows)
    return compiled


def _draw_rows(
    logits: NDArray[np.float32],
    begins: NDArray[np.int64],
    size: int,
    tops: NDArray[np.float32],
    temperatures: NDArray[np.float64],
    keys: NDArray[np.uint64],
    gamma: np.uint64,
    mix_1: np.uint64,
    mix_2: np.uint64,
    tokens: NDArray[np.int64],
) -> None:
    """Put the token that is drawn on each row in the place of its best, whose logit is `tops`.

    Compiled. Integers of 64 bits are unsigned here; together with signed ones they would become
    doubles.
    """
    one, by_11, by_27, by_30 = np.uint64(1), np.uint64(11), np.uint64(27), np.uint64(30)
    by_31, by_32 = np.uint64(31), np.uint64(32)
    hashes = np.empty(_BLOCK, dtype=np.uint64)
    passed = np.empty(_BLOCK, dtype=np.bool_)
    for number in range(len(tokens)):
        row = logits[begins[number] :]
        top, temperature, key = tops[number], temperatures[number], keys[number]
        first = tokens[number]
        scale = np.float32(_LOG2_E / temperature)
        best, second, chosen = -math.inf, -math.inf, first
        # The token with the best logit comes first, alone: it is what others have to beat.
        begin, count, following = first, 1, 0
        while begin < size:
            block = row[begin:]
            base = key + gamma * (np.uint64(begin) + one)
            bound = np.float32((_SLACK - best) * _LOG2_E + _BIAS)
            found = 0
            # Without a branch, so that it becomes vectors.
            for i in range(count):
                x = base + gamma * np.uint64(i)
                x = (x ^ (x >> by_30)) * mix_1
                x = (x ^ (x >> by_27)) * mix_2
                x = x ^ (x >> by_31)
                hashes[i] = x
                # The first 32 bits of 1 - u.
                rest = np.float32(np.uint32((~x) >> by_32))
                least = np.float32(rest.view(np.int32))
                passes = least <= ((block[i] - top) * scale + bound) * _STEP
                passed[i] = passes
                found += passes
            if found:
                for i in range(count):
                    token = begin + i
                    if not passed[i] or (token == first and following):
                        continue
                    u = min((np.float64(hashes[i] >> by_11) + 0.5) * _ULP, _BELOW_ONE)
                    score = (np.float64(block[i]) - np.float64(top)) / temperature
                    total = score - math.log(-math.log(u))
                    if total > best:
                        best, second, chosen = total, best, token
                    elif total > second:
                        second = total
            begin = following
            count = min(_BLOCK, size - begin)
            following += count
        tokens[number] = chosen if best - second > _CLOSE else _UNCLEAR
