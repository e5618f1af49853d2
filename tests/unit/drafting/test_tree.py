"""Which tokens of several guesses are worth a row, and in which order they stand."""

from hypothesis import given
from hypothesis import strategies as st

from outrider.drafting.tree import Guess, join
from outrider.messages import Draft

CHAIN = Guess.chain((1, 2, 3), (0.9, 0.8, 0.5))


def test_a_guess_alone_is_cut_where_it_is_not_reached() -> None:
    assert join([CHAIN], 0.0, 16) == Draft((1, 2, 3), priced=True)
    assert join([CHAIN], 0.7, 16) == Draft((1, 2), priced=True)
    assert join([CHAIN], 0.95, 16) == Draft(priced=True)
    assert join([CHAIN], 0.0, 1) == Draft((1,), priced=True)
    assert join([], 0.0, 16) == Draft(priced=True)


def test_levels_hang_on_the_first_token_of_the_one_before() -> None:
    guess = Guess.levels([(1, 7), (2, 8)], [(0.6, 0.3), (0.9, 0.05)])
    assert join([guess], 0.1, 16) == Draft((1, 2, 7), (-1, 0, -1), priced=True)


def test_shared_beginnings_are_one_path_and_likelier() -> None:
    other = Guess.chain((1, 5), (0.5, 0.9))
    draft = join([CHAIN, other], 0.0, 16)
    # 1 is reached with 0.95, 5 with 0.855 and what differs from it with a tenth of what it was.
    assert draft == Draft((1, 5, 2, 3), (-1, 0, 0, 2), priced=True)
    assert join([CHAIN, other], 0.92, 16) == Draft((1,), priced=True)


def test_the_less_certain_guess_counts_as_far_as_the_other_is_wrong() -> None:
    sure, unsure = Guess.chain((1,), (0.9,)), Guess.chain((2,), (0.6,))
    for guesses in ([sure, unsure], [unsure, sure]):
        assert set(join(guesses, 0.05, 16).token_ids) == {1, 2}
        assert join(guesses, 0.07, 16) == Draft((1,), priced=True)


# A level is a few tokens with their chances.
levels = st.lists(
    st.dictionaries(st.integers(0, 5), st.floats(0.01, 1.0), min_size=1, max_size=3), max_size=5
)


@given(st.lists(levels, max_size=3), st.floats(0, 1), st.integers(0, 12))
def test_whatever_is_guessed_is_a_tree_whose_beginnings_are_trees(
    drafted: list[list[dict[int, float]]], least: float, most: int
) -> None:
    guesses = [
        Guess.levels([list(level) for level in one], [list(level.values()) for level in one])
        for one in drafted
    ]
    draft = join(guesses, least, most)
    assert len(draft.token_ids) <= most
    parents = draft.parents or range(-1, len(draft.token_ids) - 1)
    edges = list(zip(parents, draft.token_ids, strict=True))
    assert all(-1 <= parent < node for node, (parent, _) in enumerate(edges))
    assert len(set(edges)) == len(edges)
    # With fewer nodes it is the same tree without the last ones.
    fewer = join(guesses, least, most // 2)
    assert fewer.token_ids == draft.token_ids[: most // 2]
