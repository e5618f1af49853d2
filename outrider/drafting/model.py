"""Drafting with a smaller language model that has the target's tokenizer.

The drafter keeps paged KV of its own. Its tokens come from the coupled rule on its own
logits, with the session's seed and positions, so that it shares the target's noise.

    committed  t0 t1 … t[L-1]             told by the target
    ahead      d0 … d[j-1]                drafted tokens that were fed back to draft more
    KV         rows 0 … kv_len-1 of committed + ahead, in that order

With a tree width above 1 the next best tokens under the same noise stand beside each drafted
token, as leaves: a target that disagrees with the best often wants one of them. They are not
fed either.

The last drafted token is never fed, so after a full acceptance the KV of one accepted token
is missing; the next catch-up feeds it together with the bonus token. Rejected tokens are
rolled back by not counting their KV: it is overwritten by the rows that come in their place.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from outrider.drafting.base import (
    PLAIN_LAW,
    DraftLaw,
    DraftRequest,
    check_base_len,
    check_token_ids,
)
from outrider.errors import UnknownSessionError
from outrider.messages import AcceptanceRule, Draft, SamplingParams, SparseDistribution
from outrider.model.blocks import BLOCK_TOKENS, BlockTable
from outrider.model.loading import LoadedModel
from outrider.model.paged import NO_PARENT, Numerics, PagedModel, Segment
from outrider.sampling.coupled import processed_scores, ranked_tokens, unusable_rows
from outrider.sampling.proposal import draw, quantised
from outrider.sampling.rows import Row

# A catch-up this short is an ordinary round, whatever else is being prefilled.
SHORT_CATCH_UP = 2 * BLOCK_TOKENS


@dataclass(slots=True, eq=False)
class _Session:
    session_id: str
    token_ids: list[int]
    sampling: SamplingParams
    law: DraftLaw
    table: BlockTable = field(default_factory=BlockTable)
    ahead: list[int] = field(default_factory=list)
    last_used: int = 0


@dataclass(slots=True, eq=False)
class _Turn:
    """What one call does for one session: feed `feed` tokens, then draft `draft_len`."""

    session: _Session
    feed: list[int]
    draft_len: int
    complete: bool
    draft: list[int] = field(default_factory=list)
    q: list[SparseDistribution] = field(default_factory=list)
    # The draft and what stands beside it, level by level.
    nodes: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    last_node: int = NO_PARENT

    @property
    def row(self) -> Row:
        """The position that is drafted next."""
        session, law = self.session, self.session.law
        return Row(session.sampling, session.token_ids, self.draft, law.prompt_len, law.stop_ids)

    @property
    def spare_nodes(self) -> int:
        """How many more tokens may stand beside the draft."""
        beside = len(self.nodes) - len(self.draft)
        return max(self.session.law.max_nodes - self.draft_len - beside, 0)

    def add(self, best: Sequence[int]) -> None:
        """Draft the first token and put the others beside it, as far as there is room."""
        level = [best[0], *best[1 : 1 + self.spare_nodes]]
        self.parents += [self.last_node] * len(level)
        self.last_node = len(self.nodes)
        self.nodes += level
        self.draft.append(best[0])

    @property
    def result(self) -> Draft:
        """What was drafted."""
        parents = self.parents if len(self.nodes) > len(self.draft) else ()
        return Draft(tuple(self.nodes), tuple(parents), tuple(self.q))

    @property
    def reports_q(self) -> bool:
        """Whether the tokens are sampled from q; without a temperature they are certain."""
        rule, sampling = self.session.law.rule, self.session.sampling
        return rule is AcceptanceRule.REJECTION and sampling.temperature > 0


class ModelDrafter:
    """A `Drafter` around a causal LM, batched over sessions.

    `total_blocks` of KV are shared by all sessions. When they run out, the session that was
    idle for longest loses its KV, which its tokens rebuild. A call prefills at most
    `prefill_chunk` rows of long catch-ups, so that one long prompt does not hold up the
    other sessions. Past the context of the model it proposes nothing, and never an id from
    `token_count` on: where the tokenizer has fewer ids than the embedding has rows, the rest
    is padding, and a target would call a draft with such an id malformed.

    `tree_width` tokens are proposed for each place, where the target takes trees.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        total_blocks: int,
        prefill_chunk: int = 256,
        token_count: int | None = None,
        numerics: Numerics | None = None,
        tree_width: int = 1,
    ) -> None:
        self._model = model
        self._token_count = token_count or model.vocab_size
        self._paged = PagedModel(model, total_blocks, numerics)
        self._prefill_chunk = prefill_chunk
        self._tree_width = tree_width
        self._sessions: dict[str, _Session] = {}
        self._clock = 0

    @property
    def name(self) -> str:
        """The name of the draft model."""
        return self._model.name

    @property
    def kv_blocks(self) -> tuple[int, int]:
        """KV blocks that no session holds, and all of them."""
        return (self.free_blocks, self.total_blocks)

    @property
    def total_blocks(self) -> int:
        """KV blocks, free or not."""
        return self._paged.pool.total

    @property
    def free_blocks(self) -> int:
        """KV blocks that no session holds."""
        return self._paged.pool.free

    def open(
        self,
        session_id: str,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        law: DraftLaw = PLAIN_LAW,
    ) -> None:
        """Remember the tokens; they are prefilled when a proposal is asked for."""
        check_token_ids(token_ids, self._paged.vocab_size)
        self.close(session_id)
        self._sessions[session_id] = _Session(session_id, list(token_ids), sampling, law)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        """One forward catches all sessions up, then one a drafted token; see `Drafter`."""
        self._clock += 1
        turns = self._plan(requests)
        self._draft([turn for turn in turns if turn is not None])
        return [turn.result if turn is not None and turn.complete else None for turn in turns]

    def commit(self, session_id: str, base_len: int, token_ids: Sequence[int]) -> None:
        """Keep the KV of the drafted tokens that were committed; see `Drafter.commit`."""
        session = self._session(session_id)
        check_base_len(base_len, len(session.token_ids))
        check_token_ids(token_ids, self._paged.vocab_size)
        kept = _common_prefix(session.ahead, token_ids)
        session.token_ids.extend(token_ids)
        session.table.kv_len = min(session.table.kv_len, base_len + kept)
        session.ahead.clear()

    def close(self, session_id: str) -> None:
        """Free the session's blocks; see `Drafter.close`."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._paged.pool.release(session.table)

    def _session(self, session_id: str) -> _Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise UnknownSessionError(f"session {session_id!r} is not open in the drafter")
        return session

    # --- what a call does ---------------------------------------------------------------

    def _plan(self, requests: Sequence[DraftRequest]) -> list[_Turn | None]:
        """A turn a request, with its blocks; None for those that have to wait."""
        sessions = [self._session(request.session_id) for request in requests]
        waiting = list(sessions)
        budget = self._prefill_chunk
        turns: list[_Turn | None] = []
        for session, request in zip(sessions, requests, strict=True):
            waiting.remove(session)
            turn = self._turn(session, request.draft_len, budget)
            if turn is None or not self._make_room(turn, sessions, waiting):
                turns.append(None)
                continue
            session.last_used = self._clock
            if not turn.complete or len(turn.feed) > SHORT_CATCH_UP:
                budget -= len(turn.feed)
            turns.append(turn)
        return turns

    def _turn(self, session: _Session, draft_len: int, budget: int) -> _Turn | None:
        """What to do for the session, given rows that are left for long catch-ups."""
        committed, table = len(session.token_ids), session.table
        # Rows that are fed sit at positions 0 .. committed + draft_len - 2.
        room = self._model.context_len + 1 - committed
        draft_len = min(draft_len, room)
        rows = committed + draft_len - 1
        if committed == 0 or room <= 0 or rows > self.total_blocks * BLOCK_TOKENS:
            self._evict(session)
            return _Turn(session, [], 0, complete=True)
        # The last committed token is fed to draft, never only to prepare.
        end = committed if draft_len else committed - 1
        table.kv_len = min(table.kv_len, committed - 1)
        session.ahead.clear()
        rest = end - table.kv_len
        if rest <= SHORT_CATCH_UP:
            return _Turn(session, session.token_ids[table.kv_len : end], draft_len, complete=True)
        if budget <= 0:
            return None
        chunk = min(rest, budget)
        feed = session.token_ids[table.kv_len : table.kv_len + chunk]
        complete = chunk == rest
        return _Turn(session, feed, draft_len if complete else 0, complete)

    def _make_room(
        self, turn: _Turn, requested: Sequence[_Session], waiting: Sequence[_Session]
    ) -> bool:
        """Give the turn its blocks, taking them from idle or else from waiting sessions.

        Waiting sessions give way last come first, so whoever asked first always gets on.
        """
        pool, table = self._paged.pool, turn.session.table
        tokens = table.kv_len + len(turn.feed) + max(turn.draft_len - 1, 0)
        if not pool.can_grow(table, tokens):
            idle = [s for s in self._sessions.values() if s not in requested]
            idle.sort(key=lambda session: session.last_used)
            victims = [*idle, *reversed(waiting)]
            takeable = sum(len(victim.table.blocks) for victim in victims)
            if pool.missing(table, tokens) > pool.free + takeable:
                return False
            while not pool.can_grow(table, tokens):
                self._evict(victims.pop(0))
        pool.grow(table, tokens)
        return True

    def _evict(self, session: _Session) -> None:
        self._paged.pool.release(session.table)
        session.ahead.clear()

    def _draft(self, turns: Sequence[_Turn]) -> None:
        """Feed what each turn has to feed, then draft token by token."""
        feeding = [turn for turn in turns if turn.feed]
        if not feeding:
            return
        logits = self._paged.forward(
            [
                Segment(turn.feed, turn.session.table, logit_rows=min(turn.draft_len, 1))
                for turn in feeding
            ]
        )
        for turn in feeding:
            turn.session.table.kv_len += len(turn.feed)
        drafting = [turn for turn in feeding if turn.draft_len]
        while drafting:
            # logits: [len(drafting), vocab]
            _choose(drafting, logits[:, : self._token_count], self._tree_width)
            drafting = [turn for turn in drafting if len(turn.draft) < turn.draft_len]
            if drafting:
                logits = self._paged.forward(
                    [Segment(turn.draft[-1:], turn.session.table, 1) for turn in drafting]
                )
            for turn in drafting:
                turn.session.table.kv_len += 1
                turn.session.ahead.append(turn.draft[-1])


def _choose(turns: Sequence[_Turn], logits: torch.Tensor, width: int) -> None:
    """Add a token to each draft, and what goes with it; logits are [turns, V].

    Where chance is shared with the target, that is up to `width - 1` tokens beside it, else
    the q that it was sampled from.
    """
    coupled = [i for i, turn in enumerate(turns) if not turn.reports_q]
    if coupled:
        ranked = ranked_tokens(logits[coupled], [turns[i].row for i in coupled], width)
        for i, best in zip(coupled, ranked, strict=True):
            turns[i].add(best)
    for turn, row_logits in zip(turns, logits, strict=True):
        if not turn.reports_q:
            continue
        row = turn.row
        scores = processed_scores(row_logits[None], [row])
        if unusable_rows(scores):
            # Nothing is left to choose here; what was drafted so far stands.
            turn.draft_len = len(turn.draft)
            continue
        q = quantised(scores[0].softmax(-1), turn.session.law.q_top)
        turn.add([draw(q, row.sampling.seed, row.position)])
        turn.q.append(q)


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens both begin with."""
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length
