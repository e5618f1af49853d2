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


@pytest.mark.parametrize("nodes", range(1, 5))
def test_a_node_without_a_target_counts_as_not_drafted(nodes: int) -> None:
    stopped = 0
    for parents, draft, dead in itertools.product(
        trees(nodes),
        itertools.product(range(2), repeat=nodes),
        itertools.product([False, True], repeat=nodes),
    ):
        if len(set(zip(parents, draft, strict=True))) < nodes:
            continue  # equal siblings, of which the second does not count
        known = [(7 * node + nodes) % 2 for node in range(nodes + 1)]
        targets = [known[0], *(None if dead[n] else known[n + 1] for n in range(nodes))]
        verdict = verify_tree(draft, parents, targets)
        path = walked(draft, parents, known)
        ending = next((node for node in path if dead[node]), None)
        if ending is None:
            assert verdict == verify_tree(draft, parents, known)
            continue
        # As if that node and what follows it had not been there.
        stopped += 1
        kept = [node for node in range(nodes) if not leads_to(node, ending, parents)]
        smaller = verify_tree(
            [draft[node] for node in kept],
            [kept.index(parents[node]) if parents[node] >= 0 else -1 for node in kept],
            [known[0], *(known[node + 1] for node in kept)],
        )
        assert verdict.token_ids == smaller.token_ids
        assert verdict.origins == smaller.origins
        assert verdict.draft_tokens == len(kept)
        assert verdict.path == tuple(kept[node] for node in smaller.path)
    assert stopped


def leads_to(node: int, ancestor: int, parents: Sequence[int]) -> bool:
    """Whether `ancestor` is on the way to the node, or is the node."""
    return node >= 0 and (node == ancestor or leads_to(parents[node], ancestor, parents))


def test_only_the_rows_on_the_way_are_looked_at() -> None:
    asked: list[int] = []

    class Targets:
        def __getitem__(self, row: int) -> int:
            asked.append(row)
            return [5, 0, 6, 9][row]

    verify_tree([4, 5, 6], [-1, -1, 1], Targets())
    assert asked == [0, 2, 3]


def test_without_any_token_of_the_target_there_is_no_verdict() -> None:
    with pytest.raises(ValueError, match="no token"):
        verify_tree([1], [-1], [None, 2])


def test_a_cut_tree_keeps_the_path_that_was_kept() -> None:
    verdict = verify_tree([1, 2, 3, 4], [-1, -1, 1, 2], [2, 0, 3, 4, 6])
    assert (verdict.token_ids, verdict.path) == ((2, 3, 4, 6), (1, 2, 3))
    cut = verdict.cut(2)
    assert (cut.token_ids, cut.path, cut.accepted, cut.draft_tokens) == ((2, 3), (1, 2), 2, 2)
    # The last token that is kept is the target's own: every draft token before it was verified.
    assert verdict.cut(4) is verdict
    assert verdict.cut(9) is verdict
