"""A suffix drafter beside a model: text that repeats itself is looked up, the rest is drafted.

A lookup costs next to nothing, so it is taken whenever as much of it can be expected to come
true as of the model's draft, less what that costs. What to expect of the model is what came
true of its drafts, in this session and in others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.drafting.automaton import Continuation, expected_tokens
from outrider.drafting.base import PLAIN_LAW, Drafter, DraftLaw, DraftRequest, HiddenStates
from outrider.drafting.hits import Hits, compared
from outrider.drafting.suffix import SuffixDrafter
from outrider.messages import Draft, SamplingParams, Tensor

# Of a model of which nothing is known: the share of its tokens that come true, those before
# them having done so.
_FIRST_RATE = 0.5
# What a token from the model costs, in steps of the target: the most that a drafter should.
_TOKEN_COST = 0.06
_NO_DRAFT = Draft()


@dataclass(slots=True)
class _Session:
    hits: Hits = field(default_factory=Hits)
    # What the model proposed last.
    drafted: Draft = _NO_DRAFT


class HybridDrafter:
    """A `Drafter` that asks `suffix` first and `model` where that promises less.

    The model does nothing for sessions whose text is looked up; it catches up when it is needed.
    """

    def __init__(self, suffix: SuffixDrafter, model: Drafter) -> None:
        self._suffix = suffix
        self._model = model
        self._sessions: dict[str, _Session] = {}
        self._hits = Hits()

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
        self._sessions[session_id] = _Session()

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        """The better of both; the model drafts in one batch. See `Drafter.propose`."""
        suggestions = self._suffix.suggest(requests)
        answers: dict[str, Draft | None] = {}
        for request, suggestion in zip(requests, suggestions, strict=True):
            if suggestion is not None and self._is_better(suggestion, request):
                answers[request.session_id] = Draft(suggestion.token_ids)
        rest = [request for request in requests if request.session_id not in answers]
        drafts = self._model.propose(rest) if rest else []
        for request, draft in zip(rest, drafts, strict=True):
            answers[request.session_id] = draft
            if draft is not None:
                self._sessions[request.session_id].drafted = draft
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

    def _is_better(self, suggestion: Continuation, request: DraftRequest) -> bool:
        """Whether the lookup promises at least what the model would gain."""
        if not suggestion.token_ids:
            return False
        session = self._sessions[request.session_id]
        rate = min(session.hits.ratio(self._hits.ratio(_FIRST_RATE)), 1.0)
        model_tokens = expected_tokens([rate] * request.draft_len)
        return suggestion.score >= model_tokens - _TOKEN_COST * request.draft_len
