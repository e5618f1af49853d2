"""A suffix drafter beside a model: text that repeats itself is looked up, the rest is drafted.

A lookup costs next to nothing, so it is taken whenever as much of it can be expected to come
true as of the model's draft, less what that costs. What to expect of the model is what came
true of its drafts, in this session and in others.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outrider.drafting.automaton import NOTHING, Continuation, expected_tokens
from outrider.drafting.base import PLAIN_LAW, Drafter, DraftLaw, DraftRequest, HiddenStates
from outrider.drafting.hits import Hits, compared
from outrider.drafting.suffix import SuffixDrafter
from outrider.drafting.tree import Guess, join
from outrider.messages import Draft, SamplingParams, Tensor

# Of a model of which nothing is known: the share of its tokens that come true, those before
# them having done so.
_FIRST_RATE = 0.5
# What a token from the model costs, in steps of the target: the most that a drafter should.
_TOKEN_COST = 0.06
_NO_DRAFT = Draft()
# How many levels the model usually drafts, what one more call says about what a level costs, and
# the most that is believed: calls that read long prompts say nothing about it.
_LEVELS = 3
_LEVEL_SHARE = 1 / 8
_MOST_LEVEL_S = 0.01


@dataclass(slots=True)
class _Session:
    law: DraftLaw
    hits: Hits = field(default_factory=Hits)
    # What the model proposed last.
    drafted: Draft = _NO_DRAFT


class GuessingDrafter(Drafter, Protocol):
    """A drafter that can say how likely its tokens are."""

    def guess(self, requests: Sequence[DraftRequest]) -> list[tuple[Draft, Guess] | None]:
        """What it would propose, and what it guesses; see `ModelDrafter.guess`."""


class HybridDrafter:
    """A `Drafter` that asks `suffix` first and `model` where that promises less.

    Where a draft has a price and may be a tree, what both say is joined in one.

    The model does nothing for sessions whose text is looked up; it catches up when it is needed.
    """

    def __init__(self, suffix: SuffixDrafter, model: GuessingDrafter) -> None:
        self._suffix = suffix
        self._model = model
        self._sessions: dict[str, _Session] = {}
        self._hits = Hits()
        self._level_s = 0.0

    @property
    def name(self) -> str:
        """Both names."""
        return f"{self._suffix.name}+{self._model.name}"

    @property
    def kv_blocks(self) -> tuple[int, int]:
        """Those of the model."""
        return self._model.kv_blocks

    @property
    def reads(self) -> HiddenStates | None:
        """What the model reads."""
        return self._model.reads

    def open(
        self,
        session_id: str,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        law: DraftLaw = PLAIN_LAW,
    ) -> None:
        """Follow the session with both; see `Drafter.open`."""
        # The model is the one that can refuse.
        self._model.open(session_id, token_ids, sampling, law)
        self._suffix.open(session_id, token_ids, sampling, law)
        self._sessions[session_id] = _Session(law)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        """The better of both, or both in one tree; the model drafts in one batch.

        See `Drafter.propose`.
        """
        suggestions = self._suffix.suggest(requests)
        found = dict(zip((r.session_id for r in requests), suggestions, strict=True))
        answers: dict[str, Draft | None] = {}
        for request, suggestion in zip(requests, suggestions, strict=True):
            if suggestion is not None and self._is_enough(suggestion, request):
                answers[request.session_id] = self._looked_up(suggestion, request)
        rest = [request for request in requests if request.session_id not in answers]
        began = time.perf_counter()
        drafts = self._model.guess(rest) if rest else []
        self._note_cost(time.perf_counter() - began, drafts)
        for request, draft in zip(rest, drafts, strict=True):
            answers[request.session_id] = None
            if draft is not None:
                suggestion = found[request.session_id] or NOTHING
                answers[request.session_id] = self._joined(request, suggestion, *draft)
                self._sessions[request.session_id].drafted = draft[0]
        return [
            # To prepare a session is to prepare both.
            None if suggestion is None and not request.draft_len else answers[request.session_id]
            for request, suggestion in zip(requests, suggestions, strict=True)
        ]

    def commit(
        self,
        session_id: str,
        base_len: int,
        token_ids: Sequence[int],
        hidden: Tensor | None = None,
    ) -> None:
        """Learn which of the two was right; see `Drafter.commit`."""
        self._model.commit(session_id, base_len, token_ids, hidden)
        self._suffix.commit(session_id, base_len, token_ids)
        session = self._sessions[session_id]
        matched, missed = compared(session.drafted, token_ids)
        session.drafted = _NO_DRAFT
        for hits in (session.hits, self._hits):
            hits.note(matched, missed)

    def close(self, session_id: str) -> None:
        """Forget the session; see `Drafter.close`."""
        self._sessions.pop(session_id, None)
        self._suffix.close(session_id)
        self._model.close(session_id)

    def _is_enough(self, suggestion: Continuation, request: DraftRequest) -> bool:
        """Whether the model has nothing to add that is worth its work."""
        if not self._may_join(request):
            return self._is_better(suggestion, request)
        if not suggestion.token_ids:
            return False
        wrong = 1 - suggestion.chances[0]
        gain = wrong * self._model_tokens(request.session_id, _LEVELS)
        return gain <= _LEVELS * self._level_s * request.price.second

    def _may_join(self, request: DraftRequest) -> bool:
        """Whether tokens are charged and trees are taken."""
        law = self._sessions[request.session_id].law
        return request.price.row > 0 and law.max_nodes > 0

    def _looked_up(self, suggestion: Continuation, request: DraftRequest) -> Draft:
        if not self._may_join(request):
            return Draft(suggestion.token_ids)
        guess = Guess.chain(suggestion.token_ids, suggestion.chances)
        law = self._sessions[request.session_id].law
        return join([guess], request.price.row, law.max_nodes)

    def _joined(
        self, request: DraftRequest, suggestion: Continuation, draft: Draft, guess: Guess
    ) -> Draft:
        """The model's draft, in one tree with what was looked up where that may be."""
        if not guess.token_ids or not self._may_join(request):
            return draft
        looked_up = Guess.chain(suggestion.token_ids, suggestion.chances)
        law = self._sessions[request.session_id].law
        return join([guess, looked_up], request.price.row, law.max_nodes)

    def _note_cost(self, seconds: float, drafts: Sequence[tuple[Draft, Guess] | None]) -> None:
        levels = max((len(of[0].token_ids) for of in drafts if of is not None), default=0)
        if levels:
            level_s = min(seconds / levels, _MOST_LEVEL_S)
            self._level_s += _LEVEL_SHARE * (level_s - self._level_s) if self._level_s else level_s

    def _model_tokens(self, session_id: str, levels: int) -> float:
        """What can be expected to come true of so many levels of the model's."""
        session = self._sessions[session_id]
        rate = min(session.hits.ratio(self._hits.ratio(_FIRST_RATE)), 1.0)
        return expected_tokens([rate] * levels)

    def _is_better(self, suggestion: Continuation, request: DraftRequest) -> bool:
        """Whether the lookup promises at least what the model would gain."""
        if not suggestion.token_ids:
            return False
        model_tokens = self._model_tokens(request.session_id, request.draft_len)
        return suggestion.score >= model_tokens - _TOKEN_COST * request.draft_len
