"""Suffix drafting: what most often followed the phrase that the session ends with.

Looks at the session's own text and at earlier outputs of its corpus (the same model and
tenant), takes the continuation of which most can be expected to come true, and stops where it
becomes unlikely. Needs no model. After Oliaro et al., "SuffixDecoding", arXiv 2411.04975.

How likely a token is comes from counts (`automaton`), corrected by how often such tokens came
true, in this session and in others (`hits`).
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.drafting.automaton import DEPTH, NOTHING, Continuation, SuffixAutomaton
from outrider.drafting.base import (
    PLAIN_LAW,
    DraftLaw,
    DraftRequest,
    check_base_len,
    check_token_ids,
)
from outrider.drafting.hits import Hits, compared
from outrider.drafting.outputs import EarlierOutputs
from outrider.errors import UnknownSessionError
from outrider.messages import Draft, SamplingParams, Tensor

# A call indexes so many tokens of long texts, about 30 ms of work.
INDEX_CHUNK = 4096
# New tokens that are an ordinary round, whatever else is being indexed.
_SHORT = 64
# A token is proposed when it comes true at least this often, those before it included.
LEAST_CHANCE = 0.1
# Of the memory so much is for earlier outputs.
_OUTPUTS_SHARE = 4
OWN, EARLIER = "own", "earlier"


def _no_hits() -> dict[str, Hits]:
    return {OWN: Hits(), EARLIER: Hits()}


@dataclass(slots=True, eq=False)
class _Session:
    token_ids: list[int]
    law: DraftLaw
    index: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    nbytes: int = 0
    # An index that does not fit into the memory, not even alone, is not made again.
    is_too_large: bool = False
    hits: dict[str, Hits] = field(default_factory=_no_hits)
    # What was suggested last, from where, and with which chances before their correction.
    suggested: Continuation = NOTHING
    source: str = OWN

    @property
    def missing(self) -> int:
        """Tokens that are not indexed."""
        return len(self.token_ids) - self.index.held


class SuffixDrafter:
    """A `Drafter` that looks up text; it fits every tokenizer.

    `memory_bytes` bounds the indexes: a quarter is for earlier outputs, unless they are not to
    be shared, and the rest for sessions. The index of the session that was asked for least
    recently goes first, and is made again from its tokens. One that does not fit alone is
    dropped, and its session drafted from earlier outputs only. Sampling parameters make no
    difference.
    """

    def __init__(self, *, memory_bytes: int = 256 << 20, share_outputs: bool = True) -> None:
        for_outputs = memory_bytes // _OUTPUTS_SHARE if share_outputs else 0
        self._outputs = EarlierOutputs(for_outputs)
        self._memory_bytes = memory_bytes - for_outputs
        self._held_bytes = 0
        # The least recently used first.
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._hits = _no_hits()

    @property
    def name(self) -> str:
        """The word of `--drafter`."""
        return "suffix"

    @property
    def kv_blocks(self) -> tuple[int, int]:
        """It has no KV."""
        return (0, 0)

    @property
    def reads(self) -> None:
        """It reads no hidden states."""

    @property
    def nbytes(self) -> int:
        """About how much memory the indexes take."""
        return self._held_bytes + self._outputs.nbytes

    def open(
        self,
        session_id: str,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        law: DraftLaw = PLAIN_LAW,
    ) -> None:
        """Remember the tokens; they are indexed when a proposal is asked for."""
        check_token_ids(token_ids)
        self.close(session_id)
        self._sessions[session_id] = _Session(list(token_ids), law)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        """Look each session up; see `Drafter.propose`."""
        return [
            None if suggestion is None else _worthwhile(suggestion, request.price.row)
            for request, suggestion in zip(requests, self.suggest(requests), strict=True)
        ]

    def suggest(self, requests: Sequence[DraftRequest]) -> list[Continuation | None]:
        """One answer a request, with the chance of each token; None as in `Drafter.propose`."""
        sessions = [self._session(request.session_id) for request in requests]
        budget = INDEX_CHUNK
        answers: list[Continuation | None] = []
        for session, request in zip(sessions, requests, strict=True):
            self._sessions.move_to_end(request.session_id)
            budget -= self._index(session, budget)
            ready = not session.missing or session.is_too_large
            answers.append(self._suggest(session, request.draft_len) if ready else None)
        self._outputs.work(budget)
        self._make_room(sessions)
        return answers

    def commit(
        self,
        session_id: str,
        base_len: int,
        token_ids: Sequence[int],
        hidden: Tensor | None = None,
    ) -> None:
        """Learn whether the suggestion came true, and keep the tokens; see `Drafter.commit`."""
        session = self._session(session_id)
        check_base_len(base_len, len(session.token_ids))
        check_token_ids(token_ids)
        matched, missed = compared(Draft(session.suggested.token_ids), token_ids)
        for hits in (session.hits, self._hits):
            hits[session.source].note(matched, missed, session.suggested.chances)
        session.suggested = NOTHING
        session.token_ids.extend(token_ids)

    def close(self, session_id: str) -> None:
        """Forget the session; what it said stays for others of its corpus."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return
        self._drop_index(session)
        if session.law.corpus:
            self._outputs.add(session.law.corpus, session.token_ids[session.law.prompt_len :])

    def _session(self, session_id: str) -> _Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise UnknownSessionError(f"session {session_id!r} is not open in the drafter")
        return session

    # --- what may come next ---------------------------------------------------------------

    def _suggest(self, session: _Session, limit: int) -> Continuation:
        if limit < 1:
            return NOTHING
        tail = session.token_ids[-DEPTH:]
        found = {
            OWN: session.index.best(session.index.own_match(), limit),
            EARLIER: self._outputs.best(session.law.corpus, tail, limit),
        }
        corrected = {source: self._corrected(session, source, c) for source, c in found.items()}
        source = OWN if corrected[OWN].score >= corrected[EARLIER].score else EARLIER
        best = corrected[source]
        session.source = source
        tokens = len(best.token_ids)
        session.suggested = Continuation(best.token_ids, found[source].chances[:tokens])
        return best

    def _corrected(self, session: _Session, source: str, found: Continuation) -> Continuation:
        """With chances as they have proved, up to where it becomes unlikely."""
        ratio = session.hits[source].ratio(self._hits[source].ratio(1.0))
        chances: list[float] = []
        reached = 1.0
        for chance in found.chances:
            chance = min(chance * ratio, 1.0)
            reached *= chance
            if reached < LEAST_CHANCE:
                break
            chances.append(chance)
        return Continuation(found.token_ids[: len(chances)], tuple(chances))

    # --- indexes --------------------------------------------------------------------------

    def _index(self, session: _Session, budget: int) -> int:
        """Index what is missing, as far as the budget goes; what was taken of it."""
        if session.is_too_large:
            return 0
        count = session.missing if session.missing <= _SHORT else min(session.missing, budget)
        held = session.index.held
        session.index.extend(session.token_ids[held : held + count])
        self._held_bytes += session.index.nbytes - session.nbytes
        session.nbytes = session.index.nbytes
        if session.nbytes > self._memory_bytes:
            self._drop_index(session)
            session.is_too_large = True
        return count if count > _SHORT else 0

    def _make_room(self, asking: Sequence[_Session]) -> None:
        """Drop indexes until the rest fits: first of those who are idle, then the last asking."""
        if self._held_bytes <= self._memory_bytes:
            return
        busy = set(asking)
        idle = [session for session in self._sessions.values() if session not in busy]
        for session in [*idle, *reversed(asking)]:
            if self._held_bytes <= self._memory_bytes:
                return
            self._drop_index(session)

    def _drop_index(self, session: _Session) -> None:
        self._held_bytes -= session.nbytes
        session.index, session.nbytes = SuffixAutomaton(), 0


def _worthwhile(suggestion: Continuation, price: float) -> Draft:
    """The tokens that are reached with a chance of `price` or more."""
    reached, count = 1.0, 0
    for chance in suggestion.chances:
        reached *= chance
        if reached < price:
            break
        count += 1
    return Draft(suggestion.token_ids[:count], priced=price > 0)
