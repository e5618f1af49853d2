"""Every small tree, every draft in it and every answer of the target."""

import itertools
from collections.abc import Iterator, Sequence

import pytest

from outrider.messages import TokenOrigin
from outrider.sampling.acceptance import verify_chain, verify_tree

ACCEPTED, RECOVERED = TokenOrigin.ACCEPTED, TokenOrigin.RECOVERED
BONUS, PLAIN = TokenOrigin.BONUS, TokenOrigin.PLAIN


def trees(nodes: int) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(-1, node) for node in range(nodes)))


def walked(
    draft: Sequence[int], parents: Sequence[int], targets: Sequence[int], node: int = -1
) -> tuple[int, ...]:
    """The nodes below `node` that plain decoding would walk through."""
    for child, parent in enumerate(parents):
        if parent == node and draft[child] == targets[node + 1]:
            return (child, *walked(draft, parents, targets, child))
    return ()


@pytest.mark.parametrize("nodes", range(5))
def test_every_small_tree(nodes: int) -> None:
    for parents, draft, targets in itertools.product(
        trees(nodes),
        itertools.product(range(2), repeat=nodes),
        itertools.product(range(2), repeat=nodes + 1),
    ):
        verdict = verify_tree(draft, parents, targets)
        path = walked(draft, parents, targets)
        end = path[-1] if path else -1
        last = PLAIN if not nodes else RECOVERED if end in parents else BONUS
        assert verdict.path == path
        assert verdict.token_ids == (*(draft[node] for node in path), targets[end + 1])
        assert verdict.origins == (ACCEPTED,) * len(path) + (last,)
        assert verdict.draft_tokens == nodes
        if parents == tuple(range(-1, nodes - 1)):
            assert verdict == verify_chain(draft, targets)


def test_of_equal_siblings_the_first_counts() -> None:
    # Both 7s agree; what follows the second one is not looked at.
    verdict = verify_tree([7, 7, 8], [-1, -1, 1], [7, 9, 8, 5])
    assert (verdict.token_ids, verdict.origins, verdict.path) == ((7, 9), (ACCEPTED, BONUS), (0,))


def test_a_cut_tree_keeps_the_path_that_was_kept() -> None:
    verdict = verify_tree([1, 2, 3, 4], [-1, -1, 1, 2], [2, 0, 3, 4, 6])
    assert (verdict.token_ids, verdict.path) == ((2, 3, 4, 6), (1, 2, 3))
    cut = verdict.cut(2)
    assert (cut.token_ids, cut.path, cut.accepted, cut.draft_tokens) == ((2, 3), (1, 2), 2, 2)
    # The last token that is kept is the target's own: every draft token before it was verified.
    assert verdict.cut(4) is verdict
    assert verdict.cut(9) is verdict
