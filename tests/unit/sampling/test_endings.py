import pytest

from outrider.messages import Endings, FinishReason
from outrider.sampling.endings import first_ending

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("token_ids", "before", "kept", "reason"),
    [
        # Nothing ends it: all is kept.
        ((), 0, 0, None),
        ((1,), 0, 1, None),
        ((1, 2, 3), 0, 3, None),
        ((1, 2, 3), 1, 3, None),
        # The first stop id is kept, and nothing after it.
        ((9,), 0, 1, STOP),
        ((1, 9, 2, 8), 0, 2, STOP),
        ((8, 9), 0, 1, STOP),
        ((1, 2, 9), 0, 3, STOP),
        # The cap counts what was committed before.
        ((1, 2, 3), 2, 3, LENGTH),
        ((1, 2, 3), 3, 2, LENGTH),
        ((1, 2, 3), 4, 1, LENGTH),
        ((1, 2, 3, 4, 5, 6), 0, 5, LENGTH),
        # What comes first counts; at one and the same token it is the stop id.
        ((1, 9, 3), 3, 2, STOP),
        ((1, 2, 9), 3, 2, LENGTH),
        ((9, 1), 4, 1, STOP),
    ],
)
def test_a_session_ends_at_a_stop_id_or_at_the_cap(
    token_ids: tuple[int, ...], before: int, kept: int, reason: FinishReason | None
) -> None:
    endings = Endings(max_new_tokens=5, stop_ids=frozenset({8, 9}))
    assert first_ending(token_ids, before, endings) == (kept, reason)


def test_a_token_beyond_the_cap_ends_a_session_that_should_have_ended() -> None:
    assert first_ending((1, 2), 7, Endings(5)) == (1, LENGTH)
