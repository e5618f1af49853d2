"""Which of the sessions that could work share the next step: rows and blocks, pure.

Decoding sessions take their rows first and prefill chunks share what is left of the row
budget. Blocks go to the oldest session first: one that lacks them does without its draft,
then takes them from the newest session that holds some; the newest of all waits.
"""

from collections.abc import Sequence
from dataclasses import replace

from outrider.model.blocks import BLOCK_TOKENS, BlockPool
from verify_worker.state import Plan, Session, Work


def form_batch(
    candidates: Sequence[Work], holders: Sequence[Session], pool: BlockPool, step_tokens: int
) -> Plan:
    """The step of about `step_tokens` rows; a prefill always gets at least a block of them.

    `candidates` and `holders` (the sessions with blocks) are ordered from the oldest on.
    Nothing changes here; `Scheduler.reserve` does what the plan says.
    """
    decode_rows = step_tokens
    decoding = sum(work.rows for work in candidates if work.committed_rows == 1)
    chunk_rows = max(step_tokens - decoding, BLOCK_TOKENS)
    budget = _BlockBudget(pool, holders)
    chosen: list[Work] = []
    for work in candidates:
        decodes = work.committed_rows == 1
        rows = decode_rows if decodes else chunk_rows
        if rows <= 0:
            continue
        taken = budget.take(_fit(work, rows), chosen)
        if taken is None:
            continue
        chosen.append(taken)
        if decodes:
            decode_rows -= taken.rows
        else:
            chunk_rows -= taken.rows
    return Plan(tuple(chosen), tuple(budget.preempted))


def _fit(work: Work, rows: int) -> Work:
    """The work cut to at most `rows` rows: a shorter draft, or a chunk of the prompt."""
    if work.committed_rows == 1:
        return replace(work, draft=work.draft.cut(rows - 1))
    chunk = min(work.committed_rows, rows)
    return replace(work, committed_rows=chunk, decides=chunk == work.committed_rows)


class _BlockBudget:
    """The blocks that a plan may still use, counting the preemptions that it implies."""

    def __init__(self, pool: BlockPool, holders: Sequence[Session]) -> None:
        self.preempted: list[Session] = []
        self._pool = pool
        self._free = pool.free
        self._holders = list(holders)

    def take(self, work: Work, chosen: Sequence[Work]) -> Work | None:
        """Set aside the blocks of `work`, perhaps without its draft; None: it has to wait."""
        if any(work.session is victim for victim in self.preempted):
            return None
        if self._missing(work) > self._free and work.draft.token_ids:
            work = replace(work, draft=work.draft.cut(0))
        missing = self._missing(work)
        while missing > self._free:
            victim = self._victim(work.session, chosen)
            if victim is None:
                return None
            self.preempted.append(victim)
            self._holders.remove(victim)
            self._free += len(victim.table.blocks)
        self._free -= missing
        return work

    def _missing(self, work: Work) -> int:
        table = work.session.table
        return self._pool.missing(table, table.kv_len + work.rows)

    def _victim(self, session: Session, chosen: Sequence[Work]) -> Session | None:
        """The newest holder that is newer than `session` and not at work in this step."""
        working = [work.session for work in chosen]
        for holder in reversed(self._holders):
            if holder is session:
                return None
            if not any(holder is other for other in working):
                return holder
        return None
