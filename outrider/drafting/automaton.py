"""A suffix automaton over a growing text, with how often each of its phrases goes on how.

The automaton (Blumer et al., 1985) has one state for every set of places where a phrase of the
text ends. A state stands for the phrases that end at just those places: suffixes of its
longest one, whose length is `_length`; its link leads to the state of the longest suffix that
ends at other places too. A text of n tokens has at most 2 n states.

Repeated phrases are told apart up to DEPTH tokens; longer ones would say no more. Where the last
DEPTH tokens have been there before, the text goes on from their state instead of from that of
all of it. So a new token costs at most a few times DEPTH steps, whatever the text, and usually
a few: one for each state that the last tokens are in.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

DEPTH = 32
_ROOT = 0
_NONE = -1
# What a phrase of length n that occurred once is worth: 1 / (1 + _DOUBT / n).
_DOUBT = 2.0
# So many suffixes of what matches are tried; a third one was never better on real text.
_TRIED = 2
# What a state takes that several tokens follow, and each of those but one, measured.
_BRANCH_BYTES, _ENTRY_BYTES = 250, 75


@dataclass(frozen=True, slots=True)
class Match:
    """A state of the automaton whose phrases the text in question ends with.

    `length` is that of the longest one, `DEPTH` at most. `open_ends` is 1 where one of the places
    is the end of the text itself, which nothing follows yet.
    """

    state: int
    length: int
    open_ends: int = 0


@dataclass(frozen=True, slots=True)
class Continuation:
    """What follows a phrase, token by token, and how likely each is, given those before it."""

    token_ids: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()

    @property
    def score(self) -> float:
        """How many tokens of it can be expected to come true."""
        return expected_tokens(self.chances)


NOTHING = Continuation()


def expected_tokens(chances: Sequence[float]) -> float:
    """How many tokens of a chain come true when each needs all before it: sum of products."""
    total, reached = 0.0, 1.0
    for chance in chances:
        reached *= chance
        total += reached
    return total


class SuffixAutomaton:
    """The phrases of one text; tokens are whole numbers, those below 0 are never proposed.

    `steps` counts the work done, in visits of states. Memory: 32 bytes a state, of which a token
    of real text makes 1.2, and a dictionary for each state that more than one token follows, one
    in eight: about 110 bytes a token. The worst, two tokens at random, is 315.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.held = 0
        self._length = array("I", [0])
        self._link = array("i", [_NONE])
        self._counts = array("I", [0])
        # Most states are followed by one token; what else follows is in a dictionary.
        self._token = array("q", [_NONE])
        self._next = array("I", [0])
        self._others: dict[int, dict[int, int]] = {}
        self._entries = 0
        # The token that has followed most often, of equals the one that came last.
        self._likeliest = array("q", [_NONE])
        # Its longest phrase is what the text ends with, at least DEPTH tokens if it has them.
        self._last = _ROOT

    @property
    def states(self) -> int:
        """How many states there are."""
        return len(self._length)

    @property
    def nbytes(self) -> int:
        """About how much memory it takes."""
        columns = (self._length, self._link, self._counts, self._token, self._next, self._likeliest)
        row = sum(column.itemsize for column in columns)
        return self.states * row + len(self._others) * _BRANCH_BYTES + self._entries * _ENTRY_BYTES

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens at the end of the text."""
        for token in token_ids:
            before = self._last
            self._add(token)
            self._count(before, token)
            # A phrase of more than DEPTH tokens that is new as a whole, but not its end.
            link = self._link[self._last]
            if link > _ROOT and self._length[link] >= DEPTH:
                self._last = link
            self.held += 1

    # --- what follows ---------------------------------------------------------------------

    def own_match(self) -> Match | None:
        """The longest phrase that the text ends with and that occurred before."""
        state = self._last
        while state > _ROOT and self._counts[state] < 2:
            self.steps += 1
            state = self._link[state]
        return self._matched(state, self._length[state], open_ends=1)

    def match(self, token_ids: Sequence[int]) -> Match | None:
        """The longest phrase of this text that `token_ids`, of another one, end with."""
        state, length = _ROOT, 0
        for token in token_ids[-DEPTH:]:
            self.steps += 1
            after = self._step(state, token)
            while after is None and state != _ROOT:
                self.steps += 1
                state = self._link[state]
                length = self._length[state]
                after = self._step(state, token)
            if after is not None:
                state, length = after, length + 1
        return self._matched(state, length, open_ends=0)

    def best(self, match: Match | None, limit: int, least: int = 1) -> Continuation:
        """The continuation of up to `limit` tokens of which most can be expected to come true.

        It follows the matched phrase or one of its next shorter suffixes of `least` tokens or
        more: long ones say more, short ones have been seen more often.
        """
        best = NOTHING
        for _ in range(_TRIED):
            if match is None or match.length < least:
                break
            found = self.follow(match, limit)
            if found.score > best.score:
                best = found
            state = self._link[match.state]
            match = self._matched(state, self._length[state], match.open_ends)
        return best

    def follow(self, match: Match, limit: int) -> Continuation:
        """Up to `limit` tokens after the phrase, each the one that came most often.

        A token that followed c of n times has the chance c / (n + _DOUBT / phrase length):
        confidence grows with counts and with the length of what they are counted after.
        """
        token_ids: list[int] = []
        chances: list[float] = []
        state, length, seen = match.state, match.length, self._counts[match.state] - match.open_ends
        while len(token_ids) < limit and seen > 0:
            self.steps += 1
            token = self._likeliest[state]
            after = self._step(state, token)
            if token < 0 or after is None:
                break
            token_ids.append(token)
            chances.append(min(self._counts[after], seen) / (seen + _DOUBT / length))
            state, length = after, length + 1
            seen = self._counts[state]
        return Continuation(tuple(token_ids), tuple(chances))

    def _matched(self, state: int, length: int, open_ends: int) -> Match | None:
        return Match(state, min(length, DEPTH), open_ends) if state > _ROOT else None

    # --- counting -------------------------------------------------------------------------

    def _count(self, before: int, token: int) -> None:
        """Count the phrases that end with `token`, which was added after the state `before`."""
        counted, state = _NONE, before
        while state != _NONE:
            self.steps += 1
            after = self._step(state, token)
            assert after is not None, "every end of the text has been given its transition"
            if after != counted:
                self._counts[after] += 1
                counted = after
            likeliest = self._likeliest[state]
            if likeliest != token:
                rival = self._step(state, likeliest) if likeliest != _NONE else None
                if rival is None or self._counts[after] >= self._counts[rival]:
                    self._likeliest[state] = token
            state = self._link[state]

    # --- the automaton --------------------------------------------------------------------

    def _step(self, state: int, token: int) -> int | None:
        """The state after the phrases of `state` and `token`."""
        if self._token[state] == token and self._next[state]:
            return self._next[state]
        others = self._others.get(state)
        return others.get(token) if others is not None else None

    def _lead(self, state: int, token: int, to: int) -> None:
        if not self._next[state] or self._token[state] == token:
            self._token[state], self._next[state] = token, to
        else:
            others = self._others.setdefault(state, {})
            self._entries += token not in others
            others[token] = to

    def _state(self, length: int) -> int:
        self._length.append(length)
        self._link.append(_ROOT)
        self._counts.append(0)
        self._token.append(_NONE)
        self._next.append(0)
        self._likeliest.append(_NONE)
        return len(self._length) - 1

    def _add(self, token: int) -> None:
        """The step of the online construction."""
        state = self._last
        after = self._step(state, token)
        if after is not None:
            self._last = self._whole(state, token, after)
            return
        self._last = new = self._state(self._length[state] + 1)
        while state != _NONE and after is None:
            self.steps += 1
            self._lead(state, token, new)
            state = self._link[state]
            after = self._step(state, token) if state != _NONE else None
        if after is not None:
            self._link[new] = self._whole(state, token, after)

    def _whole(self, state: int, token: int, after: int) -> int:
        """The state whose longest phrase is that of `state` and the token.

        If `after`, where the two lead, has longer ones too, the others end in more places from
        now on, and get a state of their own.
        """
        length = self._length[state] + 1
        if self._length[after] == length:
            return after
        part = self._state(length)
        self._link[part], self._link[after] = self._link[after], part
        self._counts[part] = self._counts[after]
        self._token[part], self._next[part] = self._token[after], self._next[after]
        self._likeliest[part] = self._likeliest[after]
        if after in self._others:
            self._others[part] = dict(self._others[after])
            self._entries += len(self._others[part])
        while state != _NONE and self._step(state, token) == after:
            self.steps += 1
            self._lead(state, token, part)
            state = self._link[state]
        return part
