import random

import pytest

from outrider.drafting.base import DraftRequest
from outrider.drafting.ngram import NgramDrafter, NgramIndex
from outrider.errors import ConfigError, FencedError, InvalidRequestError, UnknownSessionError
from outrider.messages import Draft, SamplingParams

GREEDY = SamplingParams()


def looked_up(tokens: list[int], draft_len: int, low: int = 1, high: int = 3) -> tuple[int, ...]:
    index = NgramIndex(low, high)
    index.extend(tokens)
    return index.lookup(draft_len)


def by_scanning(tokens: list[int], draft_len: int, low: int, high: int) -> tuple[int, ...]:
    """The same rule, by scanning everything."""
    for n in range(high, low - 1, -1):
        ends = [e for e in range(n, len(tokens)) if tokens[e - n : e] == tokens[len(tokens) - n :]]
        if not ends:
            continue
        enough = [end for end in ends if len(tokens) - end >= draft_len]
        end = max(enough) if enough else min(ends)
        return tuple(tokens[end : end + draft_len])
    return ()


def test_longest_match_wins_over_a_later_shorter_one() -> None:
    assert looked_up([1, 2, 3, 7, 7, 9, 3, 8, 8, 1, 2, 3], 2) == (7, 7)


def test_of_equal_matches_the_latest_wins() -> None:
    assert looked_up([1, 2, 5, 5, 1, 2, 6, 6, 1, 2], 2) == (6, 6)


def test_an_earlier_match_is_taken_when_too_few_tokens_follow_the_latest() -> None:
    assert looked_up([1, 2, 5, 6, 7, 8, 1, 2, 9, 1, 2], 4) == (5, 6, 7, 8)


def test_when_nothing_is_followed_by_enough_the_most_is_proposed() -> None:
    assert looked_up([4, 4, 4, 4], 8, high=1) == (4, 4, 4)


def test_nothing_repeats_so_nothing_is_proposed() -> None:
    assert looked_up(list(range(50)), 4) == ()
    assert looked_up([], 4) == ()
    assert looked_up([1], 4) == ()
    assert looked_up([1, 1, 1], 0) == ()


def test_matches_shorter_than_the_minimum_do_not_count() -> None:
    assert looked_up([3, 1, 4, 3], 1, low=2) == ()
    assert looked_up([3, 1, 4, 3], 1, low=1) == (1,)


@pytest.mark.parametrize("seed", range(30))
def test_the_index_finds_what_a_scan_finds(seed: int) -> None:
    rng = random.Random(seed)
    tokens = [rng.randrange(rng.choice([2, 4, 12])) for _ in range(80)]
    index = NgramIndex(1, 4)
    while len(index.token_ids) < len(tokens):
        index.extend(tokens[len(index.token_ids) :][: rng.randrange(1, 6)])
        for draft_len in (1, 3, 7):
            expected = by_scanning(index.token_ids, draft_len, 1, 4)
            assert index.lookup(draft_len) == expected


@pytest.mark.parametrize("period", [1, 7, 32_000])
def test_case_30_a_step_costs_its_new_tokens_and_not_the_prompt(period: int) -> None:
    """For the worst (one token over and over), a common and the best text."""
    lengths, draft_len = 3, 5
    index = NgramIndex(2, 4)
    index.extend([i % period for i in range(32_000)])
    for step in range(50):
        indexed, visited = index.indexed, index.visited
        index.lookup(draft_len)
        index.extend([step, step + 1, step + 2])
        assert index.indexed - indexed == 3 * lengths
        assert index.visited - visited <= (draft_len + 1) * lengths


def test_sessions_do_not_see_each_other() -> None:
    drafter = NgramDrafter(ngram_min=1, ngram_max=2)
    drafter.open("a", [1, 2, 1], GREEDY)
    drafter.open("b", [1, 3, 1], GREEDY)
    drafts = drafter.propose([DraftRequest("b", 2), DraftRequest("a", 2)])
    assert drafts == [Draft((3, 1)), Draft((2, 1))]


def test_a_commit_is_seen_and_a_proposal_is_not() -> None:
    drafter = NgramDrafter(ngram_min=1, ngram_max=2)
    drafter.open("a", [1, 2, 1], GREEDY)
    for _ in range(3):
        assert drafter.propose([DraftRequest("a", 1)]) == [Draft((2,))]
    drafter.commit("a", 3, [5, 1])
    assert drafter.propose([DraftRequest("a", 1)]) == [Draft((5,))]


def test_opening_again_begins_again() -> None:
    drafter = NgramDrafter(ngram_min=1, ngram_max=2)
    drafter.open("a", [1, 2, 1], GREEDY)
    drafter.open("a", [9, 8, 9], GREEDY)
    assert drafter.propose([DraftRequest("a", 1)]) == [Draft((8,))]


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    drafter = NgramDrafter(ngram_min=1, ngram_max=2)
    drafter.open("a", [1, 2, 1], GREEDY)
    for base_len in (2, 4):
        with pytest.raises(FencedError):
            drafter.commit("a", base_len, [7])
    with pytest.raises(InvalidRequestError, match="-1"):
        drafter.commit("a", 3, [7, -1])
    with pytest.raises(InvalidRequestError):
        drafter.open("c", [2**32], GREEDY)
    drafter.commit("a", 3, [2])
    assert drafter.propose([DraftRequest("a", 1)]) == [Draft((1,))]


def test_closed_and_unknown_sessions() -> None:
    drafter = NgramDrafter()
    drafter.open("a", [1], GREEDY)
    drafter.close("a")
    drafter.close("never")
    with pytest.raises(UnknownSessionError):
        drafter.propose([DraftRequest("a", 1)])
    with pytest.raises(UnknownSessionError):
        drafter.commit("a", 1, [1])


@pytest.mark.parametrize(("low", "high"), [(0, 3), (3, 2)])
def test_impossible_lengths_are_refused(low: int, high: int) -> None:
    with pytest.raises(ConfigError, match="ngram-min"):
        NgramDrafter(ngram_min=low, ngram_max=high)
