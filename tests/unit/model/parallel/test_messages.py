"""An order is the same after it crossed the wire."""

from hypothesis import given
from hypothesis import strategies as st

from outrider.model.blocks import BlockTable
from outrider.model.parallel.messages import Drawn, Kind, Order, Wanted, decode, encode
from outrider.model.rows import Segment

_NUMBERS = st.integers(0, 2**31 - 1)
_LISTS = st.lists(_NUMBERS, max_size=20)
_SEGMENTS = st.builds(
    Segment,
    _LISTS,
    st.builds(BlockTable, _LISTS, _NUMBERS),
    _NUMBERS,
    st.lists(st.integers(-1, 300), max_size=9),
)
_DRAWN = st.builds(
    Drawn, _NUMBERS, st.integers(0, 2**64 - 1), st.floats(min_value=1e-30, max_value=1e30)
)
_WANTED = st.builds(Wanted, _NUMBERS, _LISTS, _LISTS, st.lists(_DRAWN, max_size=5))
_ORDERS = st.builds(
    Order,
    st.sampled_from(Kind),
    st.lists(_SEGMENTS, max_size=4),
    st.lists(st.tuples(_NUMBERS, _NUMBERS), max_size=5),
    _WANTED,
)


@given(_ORDERS)
def test_what_is_decoded_is_what_was_encoded(order: Order) -> None:
    assert decode(encode(order)) == order


def test_a_step_of_sixteen_sessions_is_a_small_message() -> None:
    # 2000 tokens of context and five rows each.
    segments = [Segment([1] * 5, BlockTable([*range(125)], 1995), 5) for _ in range(16)]
    assert len(encode(Order(Kind.STEP, segments, [], Wanted(49152, (), range(80))))) < 10_000
