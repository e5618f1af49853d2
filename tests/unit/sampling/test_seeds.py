"""Seeds of samples: known values, no two alike, and no torch."""

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from outrider.sampling.seeds import derived_seed

SEEDS = st.integers(0, 2**64 - 1)


def test_sample_0_has_the_seed_itself() -> None:
    assert derived_seed(7, 0) == 7
    assert derived_seed(2**64 - 1, 0) == 2**64 - 1


def test_values_are_the_outputs_of_splitmix64() -> None:
    # mix(0) is 0, so these are the published first outputs of SplitMix64 from state 0.
    assert derived_seed(0, 1) == 0xE220A8397B1DCDAF
    assert derived_seed(0, 2) == 0x6E789E6AA1B965F4
    assert derived_seed(0, 3) == 0x06C45D188009454F


def test_values_never_change() -> None:
    assert [derived_seed(42, i) for i in (1, 15)] == [10996452266160306281, 700186318760072552]


@given(SEEDS)
def test_samples_of_a_request_differ_and_have_64_bits(seed: int) -> None:
    seeds = [derived_seed(seed, index) for index in range(16)]
    assert len(set(seeds)) == 16
    assert all(0 <= found < 2**64 for found in seeds)


def test_neighbouring_requests_share_no_seed() -> None:
    seeds = [derived_seed(seed, index) for seed in range(500) for index in range(16)]
    assert len(set(seeds)) == len(seeds)


def test_needs_no_torch() -> None:
    code = "import sys, outrider.sampling.seeds; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
