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

import time
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
from outrider.drafting.hits import Hits
from outrider.drafting.tree import Guess, join
from outrider.drafting.turns import NO_GUESS, DraftSession, Turn, choose
from outrider.errors import UnknownSessionError
from outrider.messages import Draft, SamplingParams, Tensor
from outrider.model.blocks import BLOCK_TOKENS
from outrider.model.chains import ChainTurn
from outrider.model.paged import NO_PARENT, Segment
from outrider.model.tensors import unpacked

# A catch-up this short is an ordinary round, whatever else is being prefilled.
SHORT_CATCH_UP = 2 * BLOCK_TOKENS
_UNLIKELY = 2.0
# What one more call says about what a level costs.
_LEVEL_SHARE = 1 / 8


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
        self._hits = Hits()
        self._level_s = 0.0

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
        return [
            None if turn is None else _priced(turn, turn.session.guessed) or turn.result
            for turn in self._drafted(requests)
        ]

    def guess(self, requests: Sequence[DraftRequest]) -> list[tuple[Draft, Guess] | None]:
        """What is proposed without regard to prices, and all that is known with its chances.

        Of some sessions and models no chances are known. None as in `propose`.
        """
        return [
            None if turn is None else (turn.result, turn.session.guessed)
            for turn in self._drafted(requests)
        ]

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
        self._learn(session, token_ids)
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

    def _learn(self, session: DraftSession, token_ids: Sequence[int]) -> None:
        """How the chances of the last draft have proved."""
        guessed, session.guessed = session.guessed, NO_GUESS
        chain = _main_path(guessed)
        right = _common_prefix([guessed.token_ids[node] for node in chain], token_ids)
        missed = right < min(len(chain), len(token_ids))
        trust = session.trust
        chances = [guessed.chances[node] / trust for node in chain]
        for hits in (session.hits, self._hits):
            hits.note(right, missed, chances)

    # --- what a call does ---------------------------------------------------------------

    def _drafted(self, requests: Sequence[DraftRequest]) -> list[Turn | None]:
        """The turns of those that are ready."""
        self._clock += 1
        turns = self._plan(requests)
        quick = [turn for turn in turns if turn is not None and self._is_quick(turn)]
        if quick:
            self._draft_at_once(quick)
        self._draft([turn for turn in turns if turn is not None and turn not in quick])
        return [turn if turn is not None and turn.complete else None for turn in turns]

    def _is_quick(self, turn: Turn) -> bool:
        return self._model.chains is not None and turn.session.is_plain

    def _plan(self, requests: Sequence[DraftRequest]) -> list[Turn | None]:
        """A turn a request, with its blocks; None for those that have to wait."""
        sessions = [self._session(request.session_id) for request in requests]
        waiting = list(sessions)
        budget = self._prefill_chunk
        turns: list[Turn | None] = []
        for session, request in zip(sessions, requests, strict=True):
            waiting.remove(session)
            turn = self._turn(session, request.draft_len, budget)
            if turn is not None:
                turn.price = request.price
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

    def _draft_at_once(self, turns: Sequence[Turn]) -> None:
        """Feed and draft all in one call."""
        chains = self._model.chains
        feeding = [turn for turn in turns if turn.feed]
        if chains is None or not feeding:
            return
        for turn in feeding:
            session = turn.session
            session.trust = session.hits.ratio(self._hits.ratio(1.0))
        began = time.perf_counter()
        found = chains.draft([self._chain_turn(turn) for turn in feeding])
        seconds = time.perf_counter() - began
        drafted = max(len(levels.tokens) for levels in found)
        if drafted and all(len(turn.feed) <= SHORT_CATCH_UP for turn in feeding):
            level_s = seconds / drafted
            self._level_s += _LEVEL_SHARE * (level_s - self._level_s) if self._level_s else level_s
        for turn, levels in zip(feeding, found, strict=True):
            session, count = turn.session, len(levels.tokens)
            session.note_fed(len(turn.feed))
            for level in levels.tokens:
                turn.add(level[: self._tree_width])
            session.table.kv_len += max(count - 1, 0)
            session.ahead = turn.draft[: max(count - 1, 0)]
            trust = session.trust
            chances = [[min(c * trust, 1.0) for c in level] for level in levels.chances]
            session.guessed = Guess.levels(levels.tokens, chances)

    def _chain_turn(self, turn: Turn) -> ChainTurn:
        session, price = turn.session, turn.price
        worth = price.row + price.second * self._level_s
        return ChainTurn(
            turn.feed,
            session.table,
            turn.draft_len,
            session.states_of(len(turn.feed)),
            # What is drafted next comes true about as often as not.
            worth=_UNLIKELY * worth,
            trust=session.trust,
            temperature=session.sampling.temperature,
            seed=session.sampling.seed,
        )

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


def _priced(turn: Turn, guessed: Guess) -> Draft | None:
    """The tree of what is worth its price; None where there is no price, or no chances."""
    most = turn.session.law.max_nodes
    if not turn.price.row or not guessed.token_ids or not most:
        return None
    return join([guessed], turn.price.row, most)


def _main_path(guess: Guess) -> list[int]:
    """The nodes of the chain in a guess: the first child of each."""
    path: list[int] = []
    for node, parent in enumerate(guess.parents):
        if parent == (path[-1] if path else NO_PARENT):
            path.append(node)
    return path


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
