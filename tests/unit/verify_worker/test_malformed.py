import pytest

from outrider.messages import AcceptanceRule, Draft, SparseDistribution
from verify_worker.malformed import DraftShape, fault_of

COUPLED, REJECTION = AcceptanceRule.COUPLED, AcceptanceRule.REJECTION
SHAPE = DraftShape(vocab_size=10, max_nodes=6)
# Two first tokens, and a path of three below the second.
TREE = Draft((1, 2, 1, 3, 4), (-1, -1, 1, 1, 2))


@pytest.mark.parametrize("rule", [COUPLED, REJECTION])
@pytest.mark.parametrize(
    "draft",
    [
        Draft(),
        Draft((1,)),
        Draft((1, 1, 1)),
        # A chain that spells out its parents is a chain.
        Draft((9, 0, 5), (-1, 0, 1)),
        Draft((1, 2), q=(SparseDistribution((1, 2), (3, 4)), SparseDistribution((2,), (1,)))),
    ],
)
def test_chains(draft: Draft, rule: AcceptanceRule) -> None:
    assert fault_of(draft, 3, rule, SHAPE) == ""


def test_a_tree_may_be_as_deep_as_a_chain_is_long() -> None:
    assert fault_of(TREE, 3, COUPLED, SHAPE) == ""
    assert "3 levels where 2" in fault_of(TREE, 2, COUPLED, SHAPE)
    # More tokens than were asked for, beside each other.
    assert fault_of(Draft((1, 2, 3), (-1, -1, -1)), 1, COUPLED, SHAPE) == ""


@pytest.mark.parametrize("max_nodes", range(7))
def test_a_tree_has_at_most_so_many_tokens(max_nodes: int) -> None:
    fault = fault_of(TREE, 3, COUPLED, DraftShape(10, max_nodes))
    assert fault == ("" if max_nodes >= 5 else f"a tree of 5 tokens, which may have {max_nodes}")
    # Chains have a limit of their own.
    assert fault_of(Draft((1, 2, 3)), 3, COUPLED, DraftShape(10, 0)) == ""


def test_the_rejection_rule_takes_no_tree() -> None:
    assert "chain" in fault_of(TREE, 3, REJECTION, SHAPE)


@pytest.mark.parametrize(
    ("draft", "fault"),
    [
        (Draft((1, 2, 3, 4)), "4 tokens where 3"),
        (Draft((1, 2, 3, 4), (-1, 0, 1, 2)), "4 tokens where 3"),
        (Draft((1, 10)), "token id 10 outside"),
        (Draft((-1,)), "token id -1 outside"),
        (Draft((1, 10), (-1, -1)), "token id 10 outside"),
        (Draft((1, 2), (-1, 1)), "parent"),
        (Draft((1, 2), (0, -1)), "parent"),
        (Draft((1, 2), (-1, -2)), "parent"),
        (Draft((1, 2, 3), (-1, -1)), "2 parents of 3"),
        (Draft((1, 1), (-1, -1)), "same token twice"),
        (Draft((1, 2, 3, 3), (-1, 0, 1, 1)), "same token twice"),
        (Draft((1,), q=(SparseDistribution((1, 1), (1, 1)),)), "names a token twice"),
        (Draft((1,), q=(SparseDistribution((1, 10), (1, 1)),)), "an id outside"),
        (Draft((1,), q=(SparseDistribution((1, 2), (0, 1)),)), "can't give"),
        (Draft((1, 2), (-1, -1), (SparseDistribution((1,), (1,)),) * 2), "can't give"),
    ],
)
def test_what_is_wrong(draft: Draft, fault: str) -> None:
    assert fault in fault_of(draft, 3, COUPLED, SHAPE)


def test_the_same_token_in_two_places_is_right() -> None:
    assert fault_of(Draft((1, 2, 1, 1), (-1, -1, 0, 1)), 2, COUPLED, SHAPE) == ""
