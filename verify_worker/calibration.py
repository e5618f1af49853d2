"""Times a few steps of the real target before the first session, so that costs are known.

The steps are those of sessions that do not exist: greedy ones over zeros, in blocks that are
given back. What they write to the pages nobody has.
"""

import time
from collections.abc import Callable

from outrider.messages import Draft, Endings, SamplingParams, SpeculationOptions
from outrider.model.blocks import BLOCK_TOKENS, BlockPool, BlockTable
from verify_worker.cost import CostModel, StepShape
from verify_worker.engine import StepRunner
from verify_worker.state import Plan, Session, Work

BUDGET_S = 2.0
REPEATS = 2
# Rows, sessions and context before them: more rows of a draft, then more sessions, a longer
# context, and the chunks of a prefill.
STEPS = (
    *((rows, 1, 0) for rows in (1, 2, 4, 8, 16, 32)),
    (1, 8, 0),
    (1, 1, 1024),
    (64, 1, 0),
    (128, 1, 0),
)
LONGEST_DRAFT = 31
# For which rows the log and the metrics state what a step takes.
STATED_ROWS = (1, 2, 4, 8, 16, 32, 64)


def calibrate(
    runner: StepRunner,
    pool: BlockPool,
    cost: CostModel,
    context_len: int,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run steps of growing size and let `cost` learn from them, for about `BUDGET_S` at most.

    A size that the pool or the context has no room for is left out; one that the costs so far
    say is too long for what is left ends it.
    """
    until_s = clock() + BUDGET_S
    # The first step of all is slower than any other.
    _run(runner, pool, _step(1, 1, 0))
    for rows, sessions, context in STEPS:
        blocks = sessions * -(-(context + rows) // BLOCK_TOKENS)
        if blocks > pool.free or context + rows > context_len:
            continue
        for _ in range(REPEATS):
            work = _step(rows, sessions, context)
            shape = Plan(tuple(work)).shape
            if cost.measured and clock() + cost.seconds(shape) > until_s:
                return
            cost.observe(shape, _run(runner, pool, work))


def step_times_ms(cost: CostModel) -> dict[str, float]:
    """What steps of one session take, in milliseconds by rows."""
    return {
        f"rows_{rows}": round(1000 * cost.seconds(StepShape.of(rows)), 1) for rows in STATED_ROWS
    }


def _step(rows: int, sessions: int, context: int) -> list[Work]:
    """The work of `sessions`, each with `rows` rows after `context` tokens that have KV."""
    drafted = rows - 1 if rows - 1 <= LONGEST_DRAFT else 0
    draft = Draft((0,) * drafted)
    return [
        Work(_session(number, context, rows - drafted), rows - drafted, draft)
        for number in range(sessions)
    ]


def _session(number: int, context: int, pending: int) -> Session:
    return Session(
        session_id=f"calibration-{number}",
        epoch=0,
        owner=0,
        tokens=[0] * (context + pending),
        prompt_len=context + pending,
        sampling=SamplingParams(),
        endings=Endings(LONGEST_DRAFT + 1),
        speculation=SpeculationOptions(),
        table=BlockTable(kv_len=context),
    )


def _run(runner: StepRunner, pool: BlockPool, work: list[Work]) -> float:
    """Seconds of one step; its blocks are taken before and given back after it."""
    for one in work:
        pool.grow(one.session.table, one.start + one.rows)
    try:
        return runner.run(Plan(tuple(work))).compute_s
    finally:
        for one in work:
            pool.release(one.session.table)
