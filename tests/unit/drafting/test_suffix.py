import random

import pytest

from outrider.drafting.base import DraftLaw, DraftRequest
from outrider.drafting.suffix import INDEX_CHUNK, LEAST_CHANCE, SuffixDrafter
from outrider.errors import FencedError, InvalidRequestError, UnknownSessionError
from outrider.messages import Draft, SamplingParams

GREEDY = SamplingParams()
PHRASE = [11, 12, 13, 14, 15, 16]


def proposed(drafter: SuffixDrafter, session_id: str, draft_len: int) -> tuple[int, ...]:
    """The proposal, asking until it is ready."""
    for _ in range(100):
        (draft,) = drafter.propose([DraftRequest(session_id, draft_len)])
        if draft is not None:
            return draft.token_ids
    raise AssertionError("never ready")


def law(corpus: str, prompt_len: int) -> DraftLaw:
    return DraftLaw(prompt_len=prompt_len, corpus=corpus)


def numbers(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 50_000) for _ in range(count)]


def test_it_goes_on_as_the_text_did_before() -> None:
    drafter = SuffixDrafter()
    drafter.open("s", [*PHRASE, 99, *PHRASE[:4]], GREEDY)
    assert proposed(drafter, "s", 4) == (15, 16, 99, 11)
    assert proposed(drafter, "s", 1) == (15,)
    assert proposed(drafter, "s", 0) == ()
    drafter.commit("s", 11, [15, 77])
    assert proposed(drafter, "s", 4) == ()
    drafter.commit("s", 13, [13, 14, 15])
    # Once 16, once 77: what came last.
    assert proposed(drafter, "s", 1) == (77,)


def test_sessions_do_not_see_each_other_while_they_run() -> None:
    drafter = SuffixDrafter()
    drafter.open("a", [1, 2, 3, 1, 2], GREEDY, law("m", 2))
    drafter.open("b", [1, 2, 4, 1, 2], GREEDY, law("m", 2))
    assert drafter.propose([DraftRequest("b", 1), DraftRequest("a", 1)]) == [
        Draft((4,)),
        Draft((3,)),
    ]


def test_what_a_session_said_helps_the_next_one_of_its_corpus_and_nobody_else() -> None:
    drafter = SuffixDrafter()
    drafter.open("first", [1, *PHRASE], GREEDY, law("m/tenant", 1))
    drafter.close("first")
    cases = {"same": ("m/tenant", (13, 14)), "other": ("m/another", ()), "none": ("", ())}
    for name, (corpus, expected) in cases.items():
        drafter.open(name, [50, 51, 11, 12], GREEDY, law(corpus, 2))
        # The first call takes the output in.
        proposed(drafter, name, 0)
        assert proposed(drafter, name, 2) == expected


def test_prompts_are_not_shared() -> None:
    drafter = SuffixDrafter()
    drafter.open("first", [*PHRASE, 21, 22, 23], GREEDY, law("m", len(PHRASE)))
    drafter.close("first")
    drafter.open("next", [50, 11, 12], GREEDY, law("m", 3))
    proposed(drafter, "next", 0)
    assert proposed(drafter, "next", 2) == ()
    drafter.commit("next", 3, [21, 22])
    assert proposed(drafter, "next", 2) == (23,)


def test_sharing_can_be_turned_off() -> None:
    drafter = SuffixDrafter(share_outputs=False)
    drafter.open("first", PHRASE, GREEDY, law("m", 0))
    drafter.close("first")
    drafter.open("next", [50, 11, 12], GREEDY, law("m", 3))
    proposed(drafter, "next", 0)
    assert proposed(drafter, "next", 2) == ()


def test_it_stops_where_the_rest_is_unlikely() -> None:
    # After 1 2 comes 3, and then anything.
    text = [t for n in range(40) for t in (1000 + n, 1, 2, 3, 2000 + n)]
    drafter = SuffixDrafter()
    drafter.open("s", [*text, 9, 1, 2], GREEDY)
    assert proposed(drafter, "s", 8) == (3,)
    (suggestion,) = drafter.suggest([DraftRequest("s", 8)])
    assert suggestion is not None
    assert all(chance > LEAST_CHANCE for chance in suggestion.chances)


def test_what_never_comes_true_is_expected_less() -> None:
    drafter = SuffixDrafter()
    tokens = [*PHRASE, *numbers(20)]
    drafter.open("s", tokens, GREEDY)
    scores = []
    for turn in range(60):
        committed = [*PHRASE[:3]]
        drafter.commit("s", len(tokens), committed)
        tokens += committed
        (suggestion,) = drafter.suggest([DraftRequest("s", 3)])
        assert suggestion is not None
        scores.append(suggestion.score)
        wrong = [60_000 + turn]
        drafter.commit("s", len(tokens), wrong)
        tokens += wrong
    assert scores[0] > 1
    assert scores[-1] < 0.2
    # Another session starts from what was seen here.
    drafter.open("t", [*PHRASE, 7, *PHRASE[:3]], GREEDY)
    (suggestion,) = drafter.suggest([DraftRequest("t", 3)])
    assert suggestion is not None
    assert suggestion.score < scores[0]


def test_a_long_prompt_is_indexed_in_parts_and_holds_nobody_up() -> None:
    drafter = SuffixDrafter()
    long = numbers(2 * INDEX_CHUNK + 100)
    drafter.open("long", [*long, *long[:5]], GREEDY)
    drafter.open("short", [1, 2, 3, 1, 2], GREEDY)
    requests = [DraftRequest("long", 2), DraftRequest("short", 1)]
    for _ in range(2):
        assert drafter.propose(requests) == [None, Draft((3,))]
    assert drafter.propose(requests) == [Draft(tuple(long[5:7])), Draft((3,))]


def test_memory_is_bounded_and_indexes_are_made_again() -> None:
    drafter = SuffixDrafter(memory_bytes=500_000, share_outputs=False)
    texts = {name: numbers(1000, seed) for seed, name in enumerate("abcdefgh")}
    for name, text in texts.items():
        drafter.open(name, [*text, *text[:3]], GREEDY)
    for _ in range(2):
        for name, text in texts.items():
            assert proposed(drafter, name, 2) == tuple(text[3:5])
            assert drafter.nbytes <= 500_000
    # All at once don't fit either, and each gets its answer.
    names = list(texts)
    drafts = drafter.propose([DraftRequest(name, 1) for name in names])
    while None in drafts:
        waiting = [name for name, draft in zip(names, drafts, strict=True) if draft is None]
        assert len(waiting) < len(names)
        names = waiting
        drafts = drafter.propose([DraftRequest(name, 1) for name in names])
    for name in texts:
        drafter.close(name)
    assert drafter.nbytes < 1000


def test_a_text_that_does_not_fit_alone_is_drafted_from_earlier_outputs() -> None:
    drafter = SuffixDrafter(memory_bytes=100_000)
    drafter.open("first", PHRASE, GREEDY, law("m", 0))
    drafter.close("first")
    long = numbers(3000)
    drafter.open("s", [*long, *long[:4]], GREEDY, law("m", 3000))
    assert proposed(drafter, "s", 2) == ()
    drafter.commit("s", 3004, PHRASE[:3])
    assert proposed(drafter, "s", 2) == (14, 15)
    assert drafter.nbytes <= 100_000


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    drafter = SuffixDrafter()
    drafter.open("s", [1, 2, 3, 1, 2], GREEDY)
    for base_len in (4, 6):
        with pytest.raises(FencedError):
            drafter.commit("s", base_len, [7])
    with pytest.raises(InvalidRequestError, match="-1"):
        drafter.commit("s", 5, [7, -1])
    with pytest.raises(InvalidRequestError):
        drafter.open("t", [2**32], GREEDY)
    assert proposed(drafter, "s", 1) == (3,)
    with pytest.raises(UnknownSessionError):
        drafter.propose([DraftRequest("t", 1)])
    with pytest.raises(UnknownSessionError):
        drafter.commit("t", 0, [1])
    drafter.close("t")
    drafter.open("s", [9, 8, 7, 9, 8], GREEDY)
    assert proposed(drafter, "s", 1) == (7,)
