"""Prompt lookup: the tokens that followed the same n-gram earlier in the session.

Needs no model, and pays where text repeats itself: code, quotes, retrieval, long answers.
After Saxena, "Prompt Lookup Decoding" (2023).
"""

from array import array
from collections.abc import Sequence

from outrider.drafting.base import (
    PLAIN_LAW,
    DraftLaw,
    DraftRequest,
    check_base_len,
    check_token_ids,
)
from outrider.errors import ConfigError, UnknownSessionError
from outrider.messages import Draft, SamplingParams, Tensor


class NgramIndex:
    """The tokens of one session and where each of its n-grams ended.

    Every n-gram has its last end in a dictionary, and every end knows the one before it, as
    in a Lempel-Ziv window. So a new token costs one entry a length and a lookup costs at most
    k + 1 steps a length, however long the session is. Memory is linear in tokens: about 120
    bytes a token and length where n-grams do not repeat, 4 bytes where they do.

    `indexed` and `visited` count the entries made and the candidates looked at.
    """

    def __init__(self, ngram_min: int, ngram_max: int) -> None:
        self.token_ids: list[int] = []
        self.indexed = 0
        self.visited = 0
        # Longest first, the order in which they are looked up.
        self._lengths = range(ngram_max, ngram_min - 1, -1)
        self._last_end: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in self._lengths}
        # _end_before[n][e]: the end before e of the n-gram that ends at e; 0 is none.
        self._end_before = {n: array("I", [0]) for n in self._lengths}

    def extend(self, token_ids: Sequence[int]) -> None:
        """Index tokens that follow those held."""
        for token in token_ids:
            self.token_ids.append(token)
            end = len(self.token_ids)
            for n in self._lengths:
                if end < n:
                    self._end_before[n].append(0)
                    continue
                ngram = tuple(self.token_ids[-n:])
                ends = self._last_end[n]
                self._end_before[n].append(ends.get(ngram, 0))
                ends[ngram] = end
                self.indexed += 1

    def lookup(self, draft_len: int) -> tuple[int, ...]:
        """What followed the longest n-gram that the session ends with; empty if it is new.

        Of several places it takes the latest that `draft_len` tokens follow; if there is
        none, the one that most tokens follow.
        """
        held = len(self.token_ids)
        if draft_len < 1:
            return ()
        for n in self._lengths:
            start = 0
            end = self._end_before[n][held]
            while end:
                self.visited += 1
                start = end
                # Ends fall as we go back, so at most draft_len of them are too late.
                if held - end >= draft_len:
                    break
                end = self._end_before[n][end]
            if start:
                return tuple(self.token_ids[start : start + draft_len])
        return ()


class NgramDrafter:
    """A `Drafter` that looks up the session's own tokens; it fits every tokenizer.

    Only committed tokens are indexed, so there is nothing to roll back. Sampling parameters
    make no difference to it.
    """

    def __init__(self, *, ngram_min: int = 2, ngram_max: int = 4) -> None:
        if not 1 <= ngram_min <= ngram_max:
            raise ConfigError(
                f"n-gram lengths {ngram_min} to {ngram_max} make no sense; "
                "use 1 <= --ngram-min <= --ngram-max"
            )
        self._ngram_min = ngram_min
        self._ngram_max = ngram_max
        self._sessions: dict[str, NgramIndex] = {}

    @property
    def name(self) -> str:
        """The word of `--drafter`."""
        return "ngram"

    @property
    def kv_blocks(self) -> tuple[int, int]:
        """It has no KV."""
        return (0, 0)

    @property
    def reads(self) -> None:
        """It reads no hidden states."""

    def open(
        self,
        session_id: str,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        law: DraftLaw = PLAIN_LAW,
    ) -> None:
        """Index the tokens once; see `Drafter.open`."""
        check_token_ids(token_ids)
        index = NgramIndex(self._ngram_min, self._ngram_max)
        index.extend(token_ids)
        self._sessions[session_id] = index

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        """Look each session up; it is always ready. See `Drafter.propose`."""
        indexes = [self._index(request.session_id) for request in requests]
        return [
            Draft(index.lookup(request.draft_len))
            for index, request in zip(indexes, requests, strict=True)
        ]

    def commit(
        self,
        session_id: str,
        base_len: int,
        token_ids: Sequence[int],
        hidden: Tensor | None = None,
    ) -> None:
        """Index the new tokens only; see `Drafter.commit`."""
        index = self._index(session_id)
        check_base_len(base_len, len(index.token_ids))
        check_token_ids(token_ids)
        index.extend(token_ids)

    def close(self, session_id: str) -> None:
        """Drop the index; see `Drafter.close`."""
        self._sessions.pop(session_id, None)

    def _index(self, session_id: str) -> NgramIndex:
        index = self._sessions.get(session_id)
        if index is None:
            raise UnknownSessionError(f"session {session_id!r} is not open in the drafter")
        return index
