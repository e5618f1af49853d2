import pytest

from outrider.drafting.hits import Hits, compared
from outrider.messages import Draft

CHAIN = Draft((1, 2, 3))
#   1 ── 2 ── 3
#   └─── 7    └── (8 beside 3)
TREE = Draft((1, 2, 7, 3, 8), (-1, 0, 0, 1, 1))


@pytest.mark.parametrize(
    ("draft", "committed", "expected"),
    [
        (CHAIN, [1, 2, 3, 9], (3, False)),
        (CHAIN, [1, 2, 9], (2, True)),
        (CHAIN, [9], (0, True)),
        # A plain step commits one token; of the others nothing is known.
        (CHAIN, [1], (1, False)),
        (CHAIN, [], (0, False)),
        (Draft(), [1, 2], (0, False)),
        (TREE, [1, 7, 5], (2, False)),
        (TREE, [1, 2, 8, 5], (3, False)),
        (TREE, [1, 5], (1, True)),
    ],
)
def test_what_came_true_of_a_draft(
    draft: Draft, committed: list[int], expected: tuple[int, bool]
) -> None:
    assert compared(draft, committed) == expected


def test_the_ratio_goes_from_the_guess_to_what_is_seen() -> None:
    hits = Hits()
    assert hits.ratio(0.5) == 0.5
    for _ in range(200):
        hits.note(3, missed=True)
    assert hits.ratio(0.5) == pytest.approx(0.75, abs=0.05)
    for _ in range(200):
        hits.note(0, missed=True)
    assert hits.ratio(0.5) < 0.1


def test_expectations_that_were_right_have_the_ratio_one() -> None:
    hits, too_high = Hits(), Hits()
    for turn in range(400):
        came = turn % 2
        hits.note(came, missed=not came, chances=[0.5])
        too_high.note(came, missed=not came, chances=[1.0])
    assert hits.ratio(1.0) == pytest.approx(1.0, abs=0.05)
    assert too_high.ratio(1.0) == pytest.approx(0.55, abs=0.05)
