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

A model that reads the target's hidden states (`DraftModel.reads`) is fed, with every token, the
state that the target's head made that token of. A drafted token has none: the model's own takes
its place. So once the target's come with a commit, the drafted tokens among those committed are
fed again, with these; where they do not come, the KV stays as it is.
"""

from collections.abc import Sequence

import torch

from outrider.drafting.base import (
    PLAIN_LAW,
    DraftLaw,
    DraftRequest,
    HiddenStates,
    check_base_len,
    check_token_ids,
)
from outrider.drafting.draft_model import DraftModel, Fed
from outrider.drafting.turns import DraftSession, Turn, choose
from outrider.errors import UnknownSessionError
from outrider.messages import Draft, SamplingParams, Tensor
from outrider.model.blocks import BLOCK_TOKENS
from outrider.model.paged import Segment
from outrider.model.tensors import unpacked

# A catch-up this short is an ordinary round, whatever else is being prefilled.
SHORT_CATCH_UP = 2 * BLOCK_TOKENS


class ModelDrafter:
    """A `Drafter` around a model, batched over sessions.

    The model's blocks of KV are shared by all sessions. When they run out, the session that was
    idle for longest loses its KV, which its tokens rebuild. A call prefills at most
    `prefill_chunk` rows of long catch-ups, so that one long prompt does not hold up the
    other sessions. Past the context of the model it proposes nothing.

    `tree_width` tokens are proposed for each place, where the target takes trees.
    """

    def __init__(self, model: DraftModel, *, prefill_chunk: int = 256, tree_width: int = 1) -> None:
        self._model = model
        self._pool = model.pool
        self._prefill_chunk = prefill_chunk
        self._tree_width = tree_width
        self._sessions: dict[str, DraftSession] = {}
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
        return self._pool.total

    @property
    def free_blocks(self) -> int:
        """KV blocks that no session holds."""
        return self._pool.free

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
        """Remember the tokens; they are prefilled when a proposal is asked for."""
        check_token_ids(token_ids, self._model.vocab_size)
        self.close(session_id)
        self._sessions[session_id] = DraftSession(session_id, list(token_ids), sampling, law)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        """One forward catches all sessions up, then one a drafted token; see `Drafter`."""
        self._clock += 1
        turns = self._plan(requests)
        self._draft([turn for turn in turns if turn is not None])
        return [turn.result if turn is not None and turn.complete else None for turn in turns]

    def commit(
        self,
        session_id: str,
        base_len: int,
        token_ids: Sequence[int],
        hidden: Tensor | None = None,
    ) -> None:
        """Keep the KV of the drafted tokens that were committed; see `Drafter.commit`."""
        session = self._session(session_id)
        check_base_len(base_len, len(session.token_ids))
        check_token_ids(token_ids, self._model.vocab_size)
        states = None if hidden is None or self.reads is None else unpacked(hidden)
        kept = _common_prefix(session.ahead, token_ids)
        session.token_ids.extend(token_ids)
        session.table.kv_len = min(session.table.kv_len, base_len + kept)
        session.ahead.clear()
        if states is not None:
            session.note_states(states)

    def close(self, session_id: str) -> None:
        """Free the session's blocks; see `Drafter.close`."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._pool.release(session.table)

    def _session(self, session_id: str) -> DraftSession:
        session = self._sessions.get(session_id)
        if session is None:
            raise UnknownSessionError(f"session {session_id!r} is not open in the drafter")
        return session

    # --- what a call does ---------------------------------------------------------------

    def _plan(self, requests: Sequence[DraftRequest]) -> list[Turn | None]:
        """A turn a request, with its blocks; None for those that have to wait."""
        sessions = [self._session(request.session_id) for request in requests]
        waiting = list(sessions)
        budget = self._prefill_chunk
        turns: list[Turn | None] = []
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

    def _turn(self, session: DraftSession, draft_len: int, budget: int) -> Turn | None:
        """What to do for the session, given rows that are left for long catch-ups."""
        committed, table = len(session.token_ids), session.table
        # Rows that are fed sit at positions 0 .. committed + draft_len - 2.
        room = self._model.context_len + 1 - committed
        draft_len = min(draft_len, room)
        rows = committed + draft_len - 1
        if committed == 0 or room <= 0 or rows > self.total_blocks * BLOCK_TOKENS:
            self._evict(session)
            return Turn(session, [], 0, complete=True)
        # The last committed token is fed to draft, never only to prepare.
        end = committed if draft_len else committed - 1
        table.kv_len = min(table.kv_len, committed - 1)
        session.ahead.clear()
        rest = end - table.kv_len
        if rest <= SHORT_CATCH_UP:
            return Turn(session, session.token_ids[table.kv_len : end], draft_len, complete=True)
        if budget <= 0:
            return None
        chunk = min(rest, budget)
        feed = session.token_ids[table.kv_len : table.kv_len + chunk]
        complete = chunk == rest
        return Turn(session, feed, draft_len if complete else 0, complete)

    def _make_room(
        self, turn: Turn, requested: Sequence[DraftSession], waiting: Sequence[DraftSession]
    ) -> bool:
        """Give the turn its blocks, taking them from idle or else from waiting sessions.

        Waiting sessions give way last come first, so whoever asked first always gets on.
        """
        pool, table = self._pool, turn.session.table
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

    def _evict(self, session: DraftSession) -> None:
        self._pool.release(session.table)
        session.ahead.clear()

    @torch.inference_mode()
    def _draft(self, turns: Sequence[Turn]) -> None:
        """Feed what each turn has to feed, then draft token by token."""
        feeding = [turn for turn in turns if turn.feed]
        if not feeding:
            return
        output = self._model.forward([_catch_up(turn) for turn in feeding])
        for turn in feeding:
            turn.session.note_fed(len(turn.feed))
        drafting = [turn for turn in feeding if turn.draft_len]
        while drafting:
            # output.logits: [len(drafting), R], output.hidden: [len(drafting), size]
            choose(drafting, output.logits, self._model.head, self._tree_width)
            going_on = [
                (turn, state)
                for turn, state in zip(drafting, output.hidden, strict=True)
                if len(turn.draft) < turn.draft_len
            ]
            drafting = [turn for turn, _ in going_on]
            if drafting:
                output = self._model.forward(
                    [
                        Fed(Segment(turn.draft[-1:], turn.session.table, 1), {0: state})
                        for turn, state in going_on
                    ]
                )
            for turn in drafting:
                turn.session.table.kv_len += 1
                turn.session.ahead.append(turn.draft[-1])


def _catch_up(turn: Turn) -> Fed:
    """The rows that a turn feeds, with the states that are known of their tokens."""
    session = turn.session
    segment = Segment(turn.feed, session.table, logit_rows=min(turn.draft_len, 1))
    return Fed(segment, session.states_of(len(turn.feed)))


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens both begin with."""
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length
