"""Sessions that go on from what others computed: by counters, and with the synthetic target.

That one checks on every step that the blocks of each session hold exactly its own tokens.
"""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import InternalError, InvalidRequestError
from outrider.messages import Endings, Progress
from outrider.model.blocks import BlockTable
from tests.support.scheduling import Worker
from tests.support.synthetic import VOCABULARY, plain_decoding
from verify_worker.state import Adoption, Output, ToCoordinator

PROMPT = [(7 * t + 3) % VOCABULARY for t in range(200)]
# All that a session of the 200 tokens can adopt: 12 blocks.
ADOPTABLE = 192


def start(worker: Worker, sid: str, tokens: list[int], **fields: Any) -> None:
    worker.start(sid, tokens=tokens, **{"new": 4, "drafter": None, **fields})


def run(worker: Worker, sid: str, tokens: list[int], **fields: Any) -> list[int]:
    """The rows of its steps."""
    before = len(worker.runner.rows_of_steps)
    start(worker, sid, tokens, **fields)
    worker.finish()
    assert worker.tokens[sid] == plain_decoding(tokens, fields.get("new", 4))
    return worker.runner.rows_of_steps[before:]


def test_the_second_session_computes_only_what_is_left() -> None:
    worker = Worker()
    assert run(worker, "a", PROMPT) == [200, 1, 1, 1]
    assert run(worker, "b", PROMPT) == [8, 1, 1, 1]
    assert run(worker, "c", [*PROMPT[:100], 1, 2, 3]) == [7, 1, 1, 1]
    counters = worker.scheduler.counters
    assert counters.prefix_queries == 200 + 200 + 103
    assert counters.prefix_hits == 192 + 96
    assert counters.rows == 203 + 11 + 10


def test_without_the_cache_everything_is_computed() -> None:
    worker = Worker(prefix_cache=False)
    assert run(worker, "a", PROMPT) == run(worker, "b", PROMPT) == [200, 1, 1, 1]
    assert worker.scheduler.pool.cached == worker.scheduler.counters.prefix_queries == 0


@pytest.mark.parametrize(("length", "rows"), [(1, 1), (16, 16), (17, 1), (32, 16), (33, 1)])
def test_case_6_at_block_boundaries(length: int, rows: int) -> None:
    worker = Worker()
    run(worker, "a", PROMPT[:length])
    assert run(worker, "b", PROMPT[:length])[0] == rows


@pytest.mark.parametrize("step_tokens", [64, 80, 100, 256])
def test_sessions_that_start_together_prefill_once(step_tokens: int) -> None:
    worker = Worker(step_tokens=step_tokens)
    for sid in "abcd":
        start(worker, sid, PROMPT)
    start(worker, "other", PROMPT[::-1][:40])
    worker.finish()
    assert {sid: worker.tokens[sid] for sid in "abcd"} == dict.fromkeys(
        "abcd", plain_decoding(PROMPT, 4)
    )
    # 200 once, 8 for each of the three others, 40 of its own, then 3 steps of one row each.
    assert worker.scheduler.counters.rows == 200 + 3 * 8 + 40 + 5 * 3


def test_a_prefill_that_is_under_way_adopts_at_the_end_of_a_block() -> None:
    worker = Worker(step_tokens=40)
    start(worker, "a", PROMPT)
    worker.step()
    # Somebody else was quicker.
    pool, session, quick = worker.scheduler.pool, worker.scheduler.sessions["a"], BlockTable()
    pool.grow(quick, 200)
    quick.kv_len = 200
    pool.seal(quick, session.chain)
    assert session.table.kv_len == 40
    assert worker.scheduler.prefixes.adoption(session) is None
    worker.step()
    assert session.table.kv_len == 80
    assert worker.scheduler.prefixes.adoption(session) == Adoption(tuple(quick.blocks[5:12]), 192)


def test_the_next_turn_goes_on_from_prompt_and_answer() -> None:
    worker = Worker()
    run(worker, "turn 1", PROMPT[:50], new=30)
    answer = worker.tokens["turn 1"]
    # 79 tokens have KV, so 64 of them are in full blocks.
    assert run(worker, "turn 2", [*PROMPT[:50], *answer, *PROMPT[:20]])[0] == 100 - 64


def test_a_draft_that_was_accepted_is_part_of_the_prefix_and_a_rejected_one_is_not() -> None:
    worker = Worker(draft_len=8)
    worker.start("a", tokens=PROMPT[:30], new=40)
    while worker.scheduler.sessions:
        if not worker.step():
            want = worker.scheduler.sessions["a"].want
            assert want is not None
            draft = worker.right_draft("a", want.draft_len)
            if want.base_len % 2:
                draft[-1] = (draft[-1] + 1) % VOCABULARY
            worker.propose("a", draft)
    answer = worker.tokens["a"]
    assert answer == plain_decoding(PROMPT[:30], 40)
    assert run(worker, "b", [*PROMPT[:30], *answer])[0] == 70 - 64


def test_a_preempted_session_finds_its_blocks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(blocks=9)
    said = cached_tokens(worker, monkeypatch)
    start(worker, "old", PROMPT[:60], new=40)
    start(worker, "new", PROMPT[::-1][:60], new=20)
    worker.finish()
    counters = worker.scheduler.counters
    assert counters.preemptions
    assert counters.prefix_hits
    # All the same, both have computed their prompts.
    assert said == {"old": {0}, "new": {0}}
    assert worker.tokens["old"] == plain_decoding(PROMPT[:60], 40)
    assert worker.tokens["new"] == plain_decoding(PROMPT[::-1][:60], 20)
    assert worker.scheduler.pool.free == 9


def test_the_blocks_of_another_are_not_freed_by_preempting_one_who_shares_them() -> None:
    worker = Worker(blocks=8)
    run(worker, "first", PROMPT[:64], new=2)
    # Both share 4 blocks and need 3 more each, of 4.
    start(worker, "old", [*PROMPT[:64], 1], new=47)
    start(worker, "new", [*PROMPT[:64], 2], new=47)
    worker.finish()
    assert worker.tokens["old"] == plain_decoding([*PROMPT[:64], 1], 47)
    assert worker.tokens["new"] == plain_decoding([*PROMPT[:64], 2], 47)
    assert worker.scheduler.counters.preemptions


def test_an_evicted_prefix_is_computed_again() -> None:
    worker = Worker(blocks=13)
    run(worker, "a", PROMPT)
    run(worker, "b", PROMPT[::-1])
    assert worker.scheduler.pool.evictions
    assert run(worker, "c", PROMPT)[0] > 8
    assert worker.scheduler.pool.free == 13


def test_a_block_that_is_adopted_is_not_evicted_in_the_same_step() -> None:
    worker = Worker(blocks=10)
    run(worker, "a", PROMPT[:64], new=1)
    # The oldest needs more than what is unused; what the other adopts has to stay.
    start(worker, "b", PROMPT[::-1][:80], new=2)
    start(worker, "c", [*PROMPT[:64], 5], new=2)
    worker.finish()
    assert worker.scheduler.pool.free == 10
    assert worker.tokens["c"] == plain_decoding([*PROMPT[:64], 5], 2)


def test_planning_changes_nothing() -> None:
    worker = Worker()
    run(worker, "a", PROMPT)
    start(worker, "b", PROMPT)
    pool, session = worker.scheduler.pool, worker.scheduler.sessions["b"]
    held = (pool.free, pool.cached)
    plan = worker.scheduler.plan(worker.now)
    assert plan == worker.scheduler.plan(worker.now)
    assert (pool.free, pool.cached) == held
    assert (session.table.blocks, session.table.kv_len) == ([], 0)
    assert plan is not None
    assert (plan.rows, plan.work[0].start) == (8, ADOPTABLE)


@pytest.mark.parametrize(
    ("error", "rows"), [(InternalError("broken"), 200), (InvalidRequestError("barred"), 8)]
)
def test_what_a_failed_session_leaves(error: Exception, rows: int) -> None:
    """KV that made the target fail is not trusted; a request that barred itself did no harm."""
    worker = Worker()
    start(worker, "a", PROMPT)
    worker.step()
    session = worker.scheduler.sessions["a"]
    worker.take(worker.scheduler.fail(session, error))  # type: ignore[arg-type]  # of the tree
    assert run(worker, "b", PROMPT)[0] == rows


def test_a_session_that_is_cancelled_leaves_its_prefix() -> None:
    worker = Worker()
    start(worker, "a", PROMPT)
    worker.step()
    worker.scheduler.close("a", 1)
    assert worker.scheduler.pool.free == worker.scheduler.pool.total
    assert run(worker, "b", PROMPT)[0] == 8


def cached_tokens(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> dict[str, set[int]]:
    """What each session says of it, from now on."""
    said: dict[str, set[int]] = {}
    take = worker.take

    def note(outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, ToCoordinator) and isinstance(output.event, Progress):
                said.setdefault(output.event.session_id, set()).add(output.event.cached_tokens)
        take(outputs)

    monkeypatch.setattr(worker, "take", note)
    return said


def test_progress_tells_how_much_of_the_prompt_was_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    said = cached_tokens(worker, monkeypatch)
    run(worker, "a", PROMPT)
    run(worker, "b", PROMPT)
    run(worker, "c", PROMPT[:20], new=30)
    # After a failover the completion so far is adopted too, and is not part of the prompt.
    tokens = [*PROMPT[:20], *worker.tokens["c"]]
    worker.start("d", tokens=tokens, prompt_len=20, endings=Endings(40), drafter=None)
    worker.finish()
    assert worker.scheduler.counters.prefix_hits == ADOPTABLE + 16 + 48
    assert said == {"a": {0}, "b": {ADOPTABLE}, "c": {16}, "d": {20}}


WORDS = st.lists(st.integers(0, 1), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(
    starts=st.lists(
        st.tuples(WORDS, st.integers(0, 20), st.integers(1, 30), st.integers(0, 6)), max_size=8
    ),
    blocks=st.integers(8, 14),
    data=st.data(),
)
def test_random_sessions_say_what_they_say_alone(
    starts: list[tuple[list[int], int, int, int]], blocks: int, data: st.DataObject
) -> None:
    """Shared prefixes in a pool that is too small, with drafts, right and wrong, and cancels."""
    worker = Worker(blocks=blocks, step_tokens=40, draft_len=3)
    prompts: dict[str, tuple[list[int], int]] = {}
    for number, (words, extra, new, steps) in enumerate(starts):
        tokens = [word for word in words for _ in range(16)] + list(range(extra))
        sid = f"s{number}"
        prompts[sid] = (tokens, new)
        worker.start(sid, tokens=tokens, new=new)
        for _ in range(steps):
            _step(worker, data)
        if data.draw(st.integers(0, 5)) == 0:
            worker.take(worker.scheduler.close(sid, 1))
            prompts[sid] = (tokens, len(worker.tokens.get(sid, [])))
    for _ in range(2000):
        if not worker.scheduler.sessions:
            break
        _step(worker, data)
    for sid, (tokens, new) in prompts.items():
        assert worker.tokens.get(sid, []) == plain_decoding(tokens, new)
    assert worker.scheduler.pool.free == blocks
    assert worker.scheduler.counters.prefix_hits <= worker.scheduler.counters.prefix_queries


def _step(worker: Worker, data: st.DataObject) -> None:
    """A step, or a proposal for one who waits."""
    if worker.step():
        return
    waiting = [s for s in worker.scheduler.sessions.values() if s.want is not None]
    if waiting:
        session = waiting[0]
        draft = worker.right_draft(session.session_id, session.want.draft_len)  # type: ignore[union-attr]
        if data.draw(st.booleans()):
            draft[-1] = (draft[-1] + 1) % VOCABULARY
        worker.propose(session.session_id, draft)
