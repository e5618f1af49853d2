"""Counter-based noise: a pure function of (seed, position, token, stream), never state.

The hash is the finaliser of SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom
Number Generators", OOPSLA 2014, with Stafford's variant 13 constants) in 64-bit integer
arithmetic, so the bits are the same on every device, in every batch and at every time.
"""

from collections.abc import Sequence
from enum import IntEnum

import torch

GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1
# The largest double below 1: half a step above the highest 53 bits would round to 1.
_BELOW_ONE = 1.0 - 2.0**-53


class Stream(IntEnum):
    """Independent noise for independent purposes.

    TARGET chooses the target's token (and, under the coupled rule, the drafter's guess of
    it). The rejection rule needs three more: DRAFT samples from q, ACCEPT decides on a draft
    token, RESAMPLE replaces a rejected one.
    """

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESAMPLE = 3


def _signed(value: int) -> int:
    """The two's complement reading of a 64-bit pattern."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _mix_int(x: int) -> int:
    """The finaliser on one Python integer."""
    x = ((x ^ (x >> 30)) * MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * MIX_2) & _MASK
    return x ^ (x >> 31)


def _shifted(x: torch.Tensor, bits: int, out: torch.Tensor) -> torch.Tensor:
    """x >>> bits into `out`; torch shifts keep the sign, the mask makes the shift logical."""
    return torch.bitwise_right_shift(x, bits, out=out).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor, spare: torch.Tensor) -> torch.Tensor:
    """The finaliser on int64 values, in place; `spare` is scratch of the same shape."""
    x.bitwise_xor_(_shifted(x, 30, spare)).mul_(_signed(MIX_1))
    x.bitwise_xor_(_shifted(x, 27, spare)).mul_(_signed(MIX_2))
    return x.bitwise_xor_(_shifted(x, 31, spare))


def seeded(seed: int) -> int:
    """What `key` makes of the seed before the position comes in."""
    return _mix_int((seed + GAMMA) & _MASK)


def key(seed: int, position: int, stream: Stream = Stream.TARGET) -> int:
    """The 64-bit key of one position of one session."""
    state = _mix_int((seeded(seed) ^ position) & _MASK)
    return _mix_int((state + int(stream) * GAMMA) & _MASK)


def uniform(seed: int, position: int, stream: Stream) -> float:
    """One uniform number in (0, 1) with 53 random bits: that of token 0."""
    bits = _mix_int((key(seed, position, stream) + GAMMA) & _MASK)
    return min(((bits >> 11) + 0.5) * 2.0**-53, _BELOW_ONE)


def uniforms(
    seeds: Sequence[int],
    positions: Sequence[int],
    vocab_size: int,
    *,
    stream: Stream = Stream.TARGET,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Uniform numbers in (0, 1) with 53 random bits.

    Args:
        seeds: R seeds, 64 bits unsigned.
        positions: R positions, the index in the sequence of the token that is chosen.

    Returns:
        float64 [R, vocab_size].
    """
    keys = [key(seed, position, stream) for seed, position in zip(seeds, positions, strict=True)]
    return _keyed_uniforms(keys, vocab_size, device)


def _keyed_uniforms(
    keys: Sequence[int], vocab_size: int, device: torch.device | None
) -> torch.Tensor:
    counters = torch.arange(1, vocab_size + 1, dtype=torch.int64, device=device)
    counters.mul_(_signed(GAMMA))
    return _uniforms_of(_tensor(keys, device)[:, None] + counters)


def _tensor(keys: Sequence[int], device: torch.device | None) -> torch.Tensor:
    return torch.tensor([_signed(one) for one in keys], dtype=torch.int64, device=device)


def _uniforms_of(bits: torch.Tensor) -> torch.Tensor:
    """The uniform numbers of counted keys, which are overwritten."""
    spare = torch.empty_like(bits)
    top_53 = _shifted(_mix(bits, spare), 11, spare)
    return top_53.double().add_(0.5).mul_(2.0**-53).clamp_max_(_BELOW_ONE)


def gumbels(
    seeds: Sequence[int],
    positions: Sequence[int],
    vocab_size: int,
    *,
    stream: Stream = Stream.TARGET,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Standard Gumbel noise, float64 [R, vocab_size]."""
    return _gumbels_of(uniforms(seeds, positions, vocab_size, stream=stream, device=device))


def keyed_gumbels(
    keys: Sequence[int], vocab_size: int, *, device: torch.device | None = None
) -> torch.Tensor:
    """The same for R keys: float64 [R, vocab_size]."""
    return _gumbels_of(_keyed_uniforms(keys, vocab_size, device))


def gumbels_at(keys: Sequence[int], tokens: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise of some tokens, int64 [..., R], of R keys: float64 [..., R]."""
    counters = (tokens + 1).mul_(_signed(GAMMA))
    return _gumbels_of(_uniforms_of(counters.add_(_tensor(keys, tokens.device))))


def _gumbels_of(u: torch.Tensor) -> torch.Tensor:
    return u.log_().neg_().log_().neg_()
