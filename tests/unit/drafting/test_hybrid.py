"""Which of the two is taken, and that either is told all it needs."""

from collections.abc import Sequence

import pytest

from outrider.drafting.base import PLAIN_LAW, DraftLaw, DraftRequest, check_base_len
from outrider.drafting.hybrid import HybridDrafter
from outrider.drafting.suffix import INDEX_CHUNK, SuffixDrafter
from outrider.drafting.tree import Guess
from outrider.errors import FencedError, InvalidRequestError, UnknownSessionError
from outrider.messages import Draft, Price, SamplingParams, Tensor

GREEDY = SamplingParams()
FORBIDDEN = 10**6
PHRASE = [11, 12, 13, 14, 15, 16, 17, 18]


class Successors:
    """A model that always proposes the numbers after the last token; refuses one."""

    name = "successors"
    kv_blocks = (3, 7)
    reads = None

    def __init__(self) -> None:
        self.held: dict[str, list[int]] = {}
        self.asked: list[list[str]] = []
        self.ready = True
        self.knows_chances = True

    def open(
        self,
        session_id: str,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        law: DraftLaw = PLAIN_LAW,
    ) -> None:
        if FORBIDDEN in token_ids:
            raise InvalidRequestError("not this one")
        self.held[session_id] = list(token_ids)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        self.asked.append([request.session_id for request in requests])
        return [
            Draft(tuple(self.held[r.session_id][-1] + 1 + i for i in range(r.draft_len)))
            if self.ready
            else None
            for r in requests
        ]

    def guess(self, requests: Sequence[DraftRequest]) -> list[tuple[Draft, Guess] | None]:
        found: list[tuple[Draft, Guess] | None] = []
        for draft in self.propose(requests):
            tokens = draft.token_ids if draft is not None and self.knows_chances else ()
            guess = Guess.levels([(t, t + 500) for t in tokens], [(0.6, 0.2)] * len(tokens))
            found.append(None if draft is None else (draft, guess))
        return found

    def commit(
        self,
        session_id: str,
        base_len: int,
        token_ids: Sequence[int],
        hidden: Tensor | None = None,
    ) -> None:
        check_base_len(base_len, len(self.held[session_id]))
        if FORBIDDEN in token_ids:
            raise InvalidRequestError("not this one")
        self.held[session_id] += token_ids

    def close(self, session_id: str) -> None:
        self.held.pop(session_id, None)


@pytest.fixture
def model() -> Successors:
    return Successors()


@pytest.fixture
def hybrid(model: Successors) -> HybridDrafter:
    return HybridDrafter(SuffixDrafter(), model)


def test_names_and_blocks(hybrid: HybridDrafter) -> None:
    assert hybrid.name == "suffix+successors"
    assert hybrid.kv_blocks == (3, 7)


def test_text_that_repeats_is_looked_up_and_the_rest_goes_to_the_model_in_one_batch(
    hybrid: HybridDrafter, model: Successors
) -> None:
    hybrid.open("repeats", [*PHRASE, 99, *PHRASE[:5]], GREEDY)
    hybrid.open("new", [40, 50], GREEDY)
    hybrid.open("new too", [70], GREEDY)
    requests = [DraftRequest(name, 3) for name in ("new", "repeats", "new too")]
    assert hybrid.propose(requests) == [
        Draft((51, 52, 53)),
        Draft((16, 17, 18)),
        Draft((71, 72, 73)),
    ]
    assert model.asked == [["new", "new too"]]


def decode(hybrid: HybridDrafter, tokens: list[int], text: list[int], k: int = 3) -> list[Draft]:
    """Verify proposals against a text that is to come; the proposals."""
    drafts = []
    begin = len(tokens)
    while text:
        (draft,) = hybrid.propose([DraftRequest("s", k)])
        assert draft is not None
        drafts.append(draft)
        accepted = 0
        while accepted < len(draft.token_ids) and draft.token_ids[accepted] == text[accepted]:
            accepted += 1
        committed, text = text[: accepted + 1], text[accepted + 1 :]
        hybrid.commit("s", begin, committed)
        begin += len(committed)
        if len(text) <= k:
            break
    return drafts


def test_a_model_that_is_right_wins_over_lookups_that_are_not(
    hybrid: HybridDrafter, model: Successors
) -> None:
    # Each run of successors begins like one before it, and goes on differently.
    tokens = [5, 1000, 7, 5]
    text = [t for n in range(40) for t in (*range(2000 + 10 * n, 2006 + 10 * n), 7, 5)]
    hybrid.open("s", tokens, GREEDY)
    decode(hybrid, tokens, text)
    asked = len(model.asked)
    (draft,) = hybrid.propose([DraftRequest("s", 3)])
    assert len(model.asked) == asked + 1
    assert draft is not None


def test_a_model_that_is_wrong_gives_way_to_a_doubtful_lookup(
    hybrid: HybridDrafter, model: Successors
) -> None:
    doubtful = [900, 901, 300, 5, 301, 5, 302, 900]
    hybrid.open("before", doubtful, GREEDY)
    (draft,) = hybrid.propose([DraftRequest("before", 3)])
    assert draft == Draft((901, 902, 903))
    # The model is never right in this session.
    tokens = [5]
    text = [3 * n * n for n in range(60)]
    hybrid.open("s", tokens, GREEDY)
    decode(hybrid, tokens, text)
    hybrid.open("after", [*doubtful[:1], 700, *doubtful[2:]], GREEDY)
    (draft,) = hybrid.propose([DraftRequest("after", 3)])
    assert draft is not None
    assert draft.token_ids[0] == 700


def test_to_prepare_is_to_prepare_both(hybrid: HybridDrafter, model: Successors) -> None:
    hybrid.open("s", list(range(INDEX_CHUNK + 100)), GREEDY)
    assert hybrid.propose([DraftRequest("s", 0)]) == [None]
    model.ready = False
    assert hybrid.propose([DraftRequest("s", 0)]) == [None]
    model.ready = True
    assert hybrid.propose([DraftRequest("s", 0)]) == [Draft()]


def test_the_model_drafts_while_the_text_is_still_being_indexed(
    hybrid: HybridDrafter, model: Successors
) -> None:
    hybrid.open("s", list(range(3 * INDEX_CHUNK)), GREEDY)
    assert hybrid.propose([DraftRequest("s", 1)]) == [Draft((3 * INDEX_CHUNK,))]


def test_what_one_refuses_neither_takes(hybrid: HybridDrafter, model: Successors) -> None:
    with pytest.raises(InvalidRequestError):
        hybrid.open("s", [1, FORBIDDEN], GREEDY)
    with pytest.raises(UnknownSessionError):
        hybrid.propose([DraftRequest("s", 1)])
    hybrid.open("s", [*PHRASE, *PHRASE[:5]], GREEDY)
    with pytest.raises(InvalidRequestError):
        hybrid.commit("s", 13, [FORBIDDEN])
    with pytest.raises(FencedError):
        hybrid.commit("s", 12, [1])
    assert hybrid.propose([DraftRequest("s", 2)]) == [Draft((16, 17))]
    hybrid.close("s")
    hybrid.close("s")
    assert model.held == {}


def test_plain_steps_say_nothing_about_either(hybrid: HybridDrafter, model: Successors) -> None:
    hybrid.open("s", [50], GREEDY)
    assert hybrid.propose([DraftRequest("s", 3)]) == [Draft((51, 52, 53))]
    tokens = [51, *(1000 + 7 * n for n in range(60)), 900, 300, 301, 302, 1, 900]
    for held, token in enumerate(tokens, 1):
        hybrid.commit("s", held, [token])
    # One token that was there once before promises less than a model of which little is known.
    assert hybrid.propose([DraftRequest("s", 3)]) == [Draft((901, 902, 903))]


TREES = DraftLaw(max_nodes=16)
CHEAP = Price(row=0.05, second=0.0)


def test_what_both_say_is_one_tree(hybrid: HybridDrafter, model: Successors) -> None:
    # 5 was followed by 900 once; the model says 6, 7 and beside them 506, 507.
    hybrid.open("s", [5, 900, 901, 30, 5], GREEDY, TREES)
    (draft,) = hybrid.propose([DraftRequest("s", 2, CHEAP)])
    assert draft is not None
    assert draft.priced
    paths = path_tokens(draft)
    assert {(6,), (6, 7), (506,), (900,)} <= paths
    # The likeliest come first, and parents before their children.
    assert draft.token_ids[0] == 6
    assert all(parent < node for node, parent in enumerate(draft.parents))


def test_dear_rows_leave_less_in_the_tree(hybrid: HybridDrafter) -> None:
    hybrid.open("s", [5, 900, 901, 30, 5], GREEDY, TREES)
    sizes = []
    for row in (0.01, 0.1, 0.3, 0.7):
        (draft,) = hybrid.propose([DraftRequest("s", 4, Price(row, 0.0))])
        assert draft is not None
        assert draft.priced
        sizes.append(len(draft.token_ids))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[2] > sizes[3] == 0


def test_a_certain_lookup_needs_no_model(hybrid: HybridDrafter, model: Successors) -> None:
    hybrid.open("s", PHRASE * 20, GREEDY, TREES)
    (draft,) = hybrid.propose([DraftRequest("s", 6, Price(row=0.05, second=1e9))])
    # What the model costs is not known before it was asked.
    assert model.asked == [["s"]]
    (draft,) = hybrid.propose([DraftRequest("s", 6, Price(row=0.05, second=1e9))])
    assert model.asked == [["s"]]
    assert draft == Draft((11, 12, 13, 14, 15, 16), priced=True)


@pytest.mark.parametrize("law", [PLAIN_LAW, TREES])
def test_where_trees_or_chances_are_missing_the_better_one_is_taken(
    hybrid: HybridDrafter, model: Successors, law: DraftLaw
) -> None:
    model.knows_chances = law is PLAIN_LAW
    hybrid.open("s", [5, 900, 901, 30, 50], GREEDY, law)
    assert hybrid.propose([DraftRequest("s", 3, CHEAP)]) == [Draft((51, 52, 53))]


def path_tokens(draft: Draft) -> set[tuple[int, ...]]:
    """The tokens that lead to each node, itself included."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(draft.token_ids, draft.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return set(paths)
