"""Rows that form a tree: each sees its own path, whatever stands beside it."""

from pathlib import Path

import pytest
import torch

from outrider.model.blocks import BlockTable
from outrider.model.loading import load_model
from outrider.model.numerics import FAST, INVARIANT, choose_numerics
from outrider.model.paged import NO_PARENT, PagedModel, Segment
from outrider.model.rows import flatten
from tests.support.models import FAMILIES, VOCABULARY, WINDOW, save_model

# Two trees side by side, a chain in one of them, and a leaf that follows an early row.
PARENTS = [NO_PARENT, NO_PARENT, 0, 1, 1, 3, 5, 6, 0]
TREE = [11, 12, 13, 14, 15, 16, 17, 18, 19]
LAST = 7


def paths() -> list[list[int]]:
    """The rows of each path from the root, one for every row of the tree."""
    found: list[list[int]] = []
    for row, parent in enumerate(PARENTS):
        found.append([*(found[parent] if parent != NO_PARENT else []), row])
    return found


def random_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (count,), generator=generator).tolist()


def started(model: PagedModel, tokens: list[int]) -> BlockTable:
    """A table with the KV of the tokens and room for more."""
    table = BlockTable()
    model.pool.grow(table, len(tokens) + 40)
    if tokens:
        model.forward([Segment(tokens, table, 0)])
        table.kv_len = len(tokens)
    return table


# A context that a window cuts in the middle of the tree, one that it cuts before, and none.
@pytest.mark.parametrize("context", [0, WINDOW - 4, 2 * WINDOW + 3])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("numerics", [FAST, INVARIANT])
def test_tree_rows_equal_the_chains_of_their_paths(
    numerics: str, family: str, context: int, tmp_path: Path
) -> None:
    loaded = load_model(str(save_model(tmp_path, family)))
    model = PagedModel(loaded, 60, choose_numerics(numerics, loaded))
    committed = random_tokens(context, 5)
    table, other = started(model, committed), started(model, random_tokens(9, 6))
    tree = Segment([LAST, *TREE], table, len(TREE) + 1, PARENTS)
    logits = model.forward([Segment([1, 2], other, 2), tree, Segment([3], other, 1)])
    assert logits.shape == (2 + len(TREE) + 1 + 1, VOCABULARY)
    root, rows = logits[2], logits[3:-1]
    for path in paths():
        fresh = started(model, committed)
        chain = [LAST, *(TREE[row] for row in path)]
        expected = model.forward([Segment(chain, fresh, len(chain))])
        torch.testing.assert_close(root, expected[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(rows[path], expected[1:], rtol=1e-4, atol=1e-4)
        model.pool.release(fresh)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("path", [[], [0, 8], [1, 3, 5, 6, 7], [1, 4]])
def test_an_accepted_path_goes_on_as_if_it_had_come_alone(
    path: list[int], family: str, tmp_path: Path
) -> None:
    model = PagedModel(load_model(str(save_model(tmp_path, family))), 60)
    committed = random_tokens(WINDOW + 5, 5)
    table, plain = started(model, committed), started(model, committed)
    model.forward([Segment([LAST, *TREE], table, 0, PARENTS)])
    kept = [0, *(1 + row for row in path)]
    model.keep_path(table, kept)
    table.kv_len += len(kept)
    chain = [LAST, *(TREE[row] for row in path)]
    model.forward([Segment(chain, plain, 0)])
    plain.kv_len += len(chain)
    # Twice, so that a tree also follows a kept path.
    after = [31, 32, 33]
    actual = model.forward([Segment(after, table, 3, [NO_PARENT, 0])])
    expected = model.forward([Segment(after, plain, 3)])
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_siblings_do_not_see_each_other(tmp_path: Path) -> None:
    model = PagedModel(load_model(str(save_model(tmp_path))), 20)
    table = started(model, [1, 2, 3])
    rows = [
        model.forward([Segment([4, sibling, 5], table, 1, [NO_PARENT, NO_PARENT])])
        for sibling in (6, 7)
    ]
    torch.testing.assert_close(*rows)
    # As a chain the row before is seen.
    chained = [model.forward([Segment([4, before, 5], table, 1)]) for before in (6, 7)]
    assert not torch.allclose(*chained, atol=1e-2)


@pytest.mark.parametrize("parents", [[0], [NO_PARENT, 1], [NO_PARENT, -2], [NO_PARENT] * 3])
def test_what_is_no_tree_is_refused(parents: list[int]) -> None:
    with pytest.raises(ValueError, match="tree"):
        flatten([Segment([1, 2], BlockTable([0]), 0, parents)])


def test_positions_are_depths_and_slots_are_consecutive() -> None:
    table = BlockTable([3, 1], kv_len=14)
    (span,) = flatten([Segment([0] * 10, table, 0, PARENTS)]).spans
    assert span.positions == [14, 15, 15, 16, 16, 16, 17, 18, 19, 16]
    assert [span.slot(14 + row) for row in range(4)] == [62, 63, 16, 17]
    assert span.paths[7] == [16, 18, 20, 21, 22]
