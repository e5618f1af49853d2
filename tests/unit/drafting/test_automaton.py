"""The automaton against counting by scanning, and what its steps cost."""

import random
import tracemalloc
from collections import Counter

import pytest

from outrider.drafting.automaton import DEPTH, Match, SuffixAutomaton, expected_tokens


def automaton_of(tokens: list[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    automaton.extend(tokens)
    return automaton


def followers(tokens: list[int], phrase: list[int]) -> Counter[int]:
    """How often each token comes after a phrase."""
    n = len(phrase)
    return Counter(tokens[i + n] for i in range(len(tokens) - n) if tokens[i : i + n] == phrase)


def longest_suffix(tokens: list[int], other: list[int]) -> int:
    """The length of the longest end of `other` that occurs in `tokens`, DEPTH at most."""
    for n in range(min(len(other), DEPTH), 0, -1):
        if any(tokens[i : i + n] == other[-n:] for i in range(len(tokens) - n + 1)):
            return n
    return 0


@pytest.mark.parametrize("seed", range(40))
def test_every_phrase_is_counted_as_by_scanning(seed: int) -> None:
    rng = random.Random(seed)
    letters = rng.choice([1, 2, 3, 8])
    tokens = [rng.randrange(letters) for _ in range(50)]
    # Repeats that are longer than what is told apart, each going on in its own way.
    for _ in range(3):
        start = rng.randrange(len(tokens) // 2)
        tokens += tokens[start : start + DEPTH + rng.randrange(9)]
        tokens += [rng.randrange(letters) for _ in range(3)]
    automaton = SuffixAutomaton()
    begin = 0
    while begin < len(tokens):
        end = begin + rng.randrange(1, 30)
        automaton.extend(tokens[begin:end])
        begin = end
        held = tokens[:end]
        assert automaton.states <= max(2 * len(held), 2)
        for _ in range(20):
            start = rng.randrange(len(held))
            phrase = held[start : start + rng.randrange(1, DEPTH)]
            found = automaton.match(phrase)
            assert found is not None
            assert found.length == len(phrase)
            counts = followers(held, phrase)
            ends_here = held[-len(phrase) :] == phrase
            continuation = automaton.follow(Match(found.state, len(phrase), ends_here), 1)
            if not counts:
                assert continuation.token_ids == ()
                continue
            (token,), (chance,) = continuation.token_ids, continuation.chances
            assert counts[token] == max(counts.values())
            assert chance == pytest.approx(counts[token] / (counts.total() + 2 / len(phrase)))


@pytest.mark.parametrize("seed", range(20))
def test_the_match_is_the_longest(seed: int) -> None:
    rng = random.Random(seed)
    letters = rng.choice([2, 3, 8])
    tokens = [rng.randrange(letters) for _ in range(rng.choice([5, 60, 200]))]
    automaton = automaton_of(tokens)
    own = automaton.own_match()
    earlier = longest_suffix(tokens[:-1], tokens)
    assert (own.length if own else 0) == earlier
    for _ in range(20):
        other = [rng.randrange(letters) for _ in range(rng.randrange(1, 50))]
        # Something that is there somewhere, and then goes on in its own way.
        start = rng.randrange(len(tokens))
        other += tokens[start : start + rng.randrange(60)]
        found = automaton.match(other)
        assert (found.length if found else 0) == longest_suffix(tokens, other)


def test_what_comes_most_often_is_proposed_and_of_equals_what_came_last() -> None:
    automaton = automaton_of([30, 1, 2, 5, 31, 1, 2, 6, 32, 1, 2, 5, 33, 1, 2])
    assert automaton.best(automaton.own_match(), 1, least=2).token_ids == (5,)
    automaton.extend([6, 34, 1, 2])
    assert automaton.best(automaton.own_match(), 1, least=2).token_ids == (6,)


def test_a_long_phrase_seen_once_beats_a_short_one_that_wavers() -> None:
    once = [9, 8, 7, 1, 2, 100]
    wavering = [t for n in range(6) for t in (50 + n, 1, 2, 60 + n % 2)]
    automaton = automaton_of([*once, *wavering, 9, 8, 7, 1, 2])
    assert automaton.best(automaton.own_match(), 1).token_ids == (100,)


def test_a_short_phrase_that_is_sure_beats_a_long_one_that_wavers() -> None:
    wavering = [t for n in range(4) for t in (9, 1, 2, 60 + n)]
    sure = [t for n in range(40) for t in (70 + n, 1, 2, 5)]
    automaton = automaton_of([*wavering, *sure, 9, 1, 2])
    assert automaton.best(automaton.own_match(), 1).token_ids == (5,)


def test_confidence_grows_with_counts_and_length() -> None:
    def chance(times: int, length: int) -> float:
        phrase = list(range(length))
        text = [t for n in range(times) for t in (*phrase, 500, 1000 + n)]
        automaton = automaton_of([*text, *phrase])
        return automaton.best(automaton.own_match(), 1, least=length).chances[0]

    assert chance(1, 2) < chance(3, 2) < chance(9, 2) < 1
    assert chance(1, 2) < chance(1, 4) < chance(1, 16) < 1


def test_numbers_below_zero_are_never_proposed() -> None:
    automaton = automaton_of([1, 2, 3, -1, 1, 2])
    assert automaton.best(automaton.own_match(), 5).token_ids == (3,)
    other = automaton_of([1, 2, -1, 5, 6])
    assert other.best(other.match([1, 2]), 5).token_ids == ()


def test_without_a_match_there_is_nothing() -> None:
    automaton = automaton_of(list(range(50)))
    assert automaton.own_match() is None
    assert automaton.match([99]) is None
    assert automaton.best(None, 4).token_ids == ()
    assert SuffixAutomaton().own_match() is None
    assert SuffixAutomaton().match([1]) is None


def test_the_score_is_what_can_be_expected_to_come_true() -> None:
    assert expected_tokens([0.5, 0.5]) == 0.75
    assert expected_tokens([]) == 0


@pytest.mark.parametrize("period", [1, 2, 7, 32_000])
def test_a_step_costs_its_new_tokens_and_not_the_prompt(period: int) -> None:
    """Case 30, for the worst (one token over and over), a common and the best text."""
    automaton = automaton_of([i % period for i in range(32_000)])
    for step in range(50):
        steps = automaton.steps
        automaton.best(automaton.own_match(), 5)
        automaton.match(list(range(100)))
        assert automaton.steps - steps <= 5 * DEPTH
        steps = automaton.steps
        automaton.extend([step, step + 1, 40_000])
        assert automaton.steps - steps <= 3 * (3 * DEPTH)


@pytest.mark.parametrize("letters", [1, 2, 20, 10_000])
def test_memory_is_what_it_says(letters: int) -> None:
    rng = random.Random(0)
    tokens = [rng.randrange(letters) for _ in range(6000)]
    tracemalloc.start()
    try:
        automaton = automaton_of(tokens)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.6 * taken - 3000 < automaton.nbytes < 1.4 * taken + 3000
    assert automaton.nbytes < 340 * len(tokens)
