"""SplitMix64 in plain integers, and its inverse: seeds that lead to given bits."""

GAMMA = 0x9E3779B97F4A7C15
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK = (1 << 64) - 1


def reference_mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * MIX_1) & MASK
    x = ((x ^ (x >> 27)) * MIX_2) & MASK
    return x ^ (x >> 31)


def unshifted(x: int, bits: int) -> int:
    """y with y ^ (y >> bits) == x."""
    y = x
    for _ in range(64 // bits):
        y = x ^ (y >> bits)
    return y


def unmixed(x: int) -> int:
    x = (unshifted(x, 31) * pow(MIX_2, -1, 1 << 64)) & MASK
    x = (unshifted(x, 27) * pow(MIX_1, -1, 1 << 64)) & MASK
    return unshifted(x, 30)


def seed_of(bits: int, position: int, stream: int = 0, token: int = 0) -> int:
    """The seed whose hash at a position, stream and token is `bits`."""
    state = unmixed((unmixed(bits) - GAMMA * (token + 1)) & MASK)
    state = unmixed((state - stream * GAMMA) & MASK)
    return (unmixed(state ^ position) - GAMMA) & MASK
