"""Which of the sessions that could work share the next step: rows and blocks, pure.

Decoding sessions take their rows first, one each before any draft, so that no draft keeps
another session from its step; prefill chunks share what is left of the row budget. Blocks go
to the oldest session first: one that lacks them does without its draft, then takes them from
the newest session that holds some; the newest of all waits.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from outrider.model.blocks import BLOCK_TOKENS, BlockPool
from outrider.model.prefix import adoptable_blocks
from verify_worker.state import Plan, Session, Work


def form_batch(
    candidates: Sequence[Work],
    holders: Sequence[Session],
    pool: BlockPool,
    step_tokens: int,
    chunk_rows: int,
) -> Plan:
    """The step of about `step_tokens` rows; a prefill always gets at least a block of them.

    Prefill chunks get at most `chunk_rows` of them, and what decoding leaves.
    `candidates` and `holders` (the sessions with blocks) are ordered from the oldest on.
    Nothing changes here; `Scheduler.reserve` does what the plan says.
    """
    decode_rows = step_tokens
    decoding = sum(work.rows for work in candidates if work.committed_rows == 1)
    to_come = sum(work.committed_rows == 1 for work in candidates)
    chunk_rows = max(min(step_tokens - decoding, chunk_rows), BLOCK_TOKENS)
    budget = _BlockBudget(pool, holders)
    chosen: list[Work] = []
    # Hashes of the blocks that the chosen prefills fill in this step.
    filling: set[bytes] = set()
    for work in candidates:
        decodes = work.committed_rows == 1
        rows = chunk_rows
        if decodes:
            to_come -= 1
            rows = min(max(decode_rows - to_come, 1), decode_rows)
        # What another session computes right now is there to adopt in the next step.
        if rows <= 0 or (not decodes and filling.intersection(_first_block(work))):
            continue
        taken = budget.take(_fit(work, rows), chosen)
        if taken is None:
            continue
        chosen.append(taken)
        if decodes:
            decode_rows -= taken.rows
        else:
            chunk_rows -= taken.rows
            filling.update(_filled_blocks(taken))
    return Plan(tuple(chosen), tuple(budget.preempted))


def _fit(work: Work, rows: int) -> Work:
    """The work cut to at most `rows` rows: a shorter draft, or a chunk of the prompt.

    The first nodes of a tree are a tree, since parents come before their children.
    """
    if work.committed_rows == 1:
        return replace(work, draft=work.draft.cut(rows - 1))
    chunk = min(work.committed_rows, rows)
    return replace(work, committed_rows=chunk, decides=chunk == work.committed_rows)


def _first_block(work: Work) -> list[bytes]:
    """The hash of the block that a prefill fills first, if it could be adopted instead."""
    first = work.start // BLOCK_TOKENS
    end = min(first + 1, adoptable_blocks(len(work.session.tokens)))
    return work.session.chain[first:end]


def _filled_blocks(work: Work) -> list[bytes]:
    end = (work.start + work.committed_rows) // BLOCK_TOKENS
    return work.session.chain[work.start // BLOCK_TOKENS : end]


class _BlockBudget:
    """The blocks that a plan may still use, counting the preemptions that it implies.

    Blocks can have several users: those that a preempted session shares with others do not
    come free, and a cached block that is adopted is not free any more.
    """

    def __init__(self, pool: BlockPool, holders: Sequence[Session]) -> None:
        self.preempted: list[Session] = []
        self._pool = pool
        self._free = pool.free
        self._holders = list(holders)
        # How many users more or less a block has by the plan.
        self._change: Counter[int] = Counter()

    def take(self, work: Work, chosen: Sequence[Work]) -> Work | None:
        """Set aside the blocks of `work`, perhaps without its draft; None: it has to wait."""
        if any(work.session is victim for victim in self.preempted):
            return None
        self._adopt(work, 1)
        if self._missing(work) > self._free and work.draft.token_ids:
            work = replace(work, draft=work.draft.cut(0))
        missing = self._missing(work)
        victims: list[Session] = []
        while missing > self._free:
            victim = self._victim(work.session, chosen, victims)
            if victim is None:
                # Nobody is preempted in vain.
                for spared in victims:
                    self._count(spared.table.blocks, 1)
                self._adopt(work, -1)
                return None
            victims.append(victim)
            self._count(victim.table.blocks, -1)
        self.preempted += victims
        self._free -= missing
        return work

    def _missing(self, work: Work) -> int:
        """Blocks that the rows need beyond what the session has or adopts."""
        if work.adoption is not None:
            return -(-work.rows // BLOCK_TOKENS)
        return self._pool.missing(work.session.table, work.start + work.rows)

    def _adopt(self, work: Work, by: int) -> None:
        """Count what `work` adopts; `by` -1 takes that back."""
        if work.adoption is not None:
            self._count(work.adoption.blocks, by)

    def _count(self, blocks: Sequence[int], by: int) -> None:
        for block in blocks:
            before = self._pool.users(block) + self._change[block]
            self._change[block] += by
            self._free += (before + by == 0) - (before == 0)

    def _victim(
        self, session: Session, chosen: Sequence[Work], victims: Sequence[Session]
    ) -> Session | None:
        """The newest holder that is newer than `session` and not at work in this step."""
        spoken_for = [*(work.session for work in chosen), *self.preempted, *victims]
        for holder in reversed(self._holders):
            if holder is session:
                return None
            if not any(holder is other for other in spoken_for):
                return holder
        return None
