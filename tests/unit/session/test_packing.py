"""Logs as bytes."""

from hypothesis import given
from hypothesis import strategies as st

from outrider.messages import TokenLogprobs
from outrider.session.packing import (
    pack_logprobs,
    pack_tokens,
    unpack_logprobs,
    unpack_tokens,
)

IDS = st.integers(0, 2**32 - 1)
LOGPROBS = st.floats(max_value=0, allow_nan=False)
ENTRIES = st.builds(TokenLogprobs, LOGPROBS, st.lists(st.tuples(IDS, LOGPROBS)).map(tuple))


@given(st.lists(IDS), st.lists(IDS))
def test_packed_tokens_are_appended_and_unpacked(one: list[int], two: list[int]) -> None:
    assert unpack_tokens(pack_tokens(one) + pack_tokens(two)) == one + two


def test_tokens_are_packed_little_endian() -> None:
    assert pack_tokens([1, 258]) == b"\x01\0\0\0\x02\x01\0\0"


@given(st.lists(ENTRIES), st.lists(ENTRIES))
def test_packed_logprobs_are_appended_and_unpacked(
    one: list[TokenLogprobs], two: list[TokenLogprobs]
) -> None:
    assert unpack_logprobs(pack_logprobs(one) + pack_logprobs(two)) == one + two
