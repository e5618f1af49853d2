"""Seeds of the samples of one request. Importing this module does not load torch.

Sample 0 has the request's own seed. Sample i > 0 has the i-th output of SplitMix64 (Steele,
Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014, section 3; its
finaliser with Stafford's variant 13 constants), started in the state mix(seed):

    derived(seed, i) = mix(mix(seed) + i * gamma)    modulo 2^64

mix is a bijection and gamma is odd, so the samples i > 0 of a request never share a seed;
because seed goes through mix first, requests with neighbouring seeds do not overlap either,
as `seed + i` would make them.
"""

SEED_BITS = 64
_MASK = (1 << SEED_BITS) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def derived_seed(seed: int, index: int) -> int:
    """The seed of sample `index` (from 0) of a request with `seed`, both 64 bits unsigned.

    A request of one sample with this seed gives the same tokens again.
    """
    if index == 0:
        return seed
    return _mix((_mix(seed) + index * _GAMMA) & _MASK)


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)
