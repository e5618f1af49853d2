"""Random steps of scheduler, runner and a real tiny model against plain decoding.

The machine admits sessions, answers their wants with right, wrong, empty and malformed chains
and trees, steps, cancels, moves sessions, breaks forward passes, and looks into the KV. The
pool is small, so that sessions lose their blocks to others; prompts share beginnings, so that
sessions adopt the blocks of others. After every rule each session must have said what plain
decoding says, and the blocks must add up.
"""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from outrider.messages import AssignDrafter, Draft, SamplingParams, SessionFailed, TokenOrigin
from outrider.model.blocks import BLOCK_TOKENS, BlockTable
from outrider.model.loading import LoadedModel, load_model
from outrider.model.paged import PagedModel, Segment
from outrider.model.rows import StepOutput
from tests.support.models import TOKENS, save_model
from tests.support.stepping import DRAFTER, Reference, Said, Stepper
from verify_worker.state import Session

RUNS, RULES_OF_A_RUN = 30, 100
BLOCKS, CONTEXT, MAX_NODES = 8, 72, 24
# Between scores that are closer, rounding may decide.
NEAR_TIE = 1e-4
MOST_SESSIONS = 5

TEXT = [(t * t * 31 + t * 7) % TOKENS for t in range(49)]
LENGTHS = (1, 5, BLOCK_TOKENS, BLOCK_TOKENS + 1, 2 * BLOCK_TOKENS, 40, 49)
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(0.8, seed=3),
    SamplingParams(1.1, top_k=40, top_p=0.95, seed=2**63 + 5),
)
SEEDS = st.integers(0, 2**16 - 1)
WHAT_HAPPENS = (
    *("admitted", "tokens", "chain", "tree", "accepted", "rejected", "accepted in trees"),
    *("preempted", "adopted", "missed", "malformed", "looked into"),
    *("cancelled", "begun again", "owners gone", "broken", "failed"),
)


class Machine(RuleBasedStateMachine):
    """One worker; `tally` counts over all runs what happened, so that nothing is left out."""

    def __init__(self, model: LoadedModel, reference: Reference, tally: Counter[str]) -> None:
        super().__init__()
        self.reference = reference
        self.tally = tally
        self.worker = Stepper(
            model,
            BLOCKS,
            context_len=CONTEXT,
            step_tokens=48,
            max_sessions=4,
            draft_len=4,
            max_tree_nodes=MAX_NODES,
        )
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.samplings: dict[str, SamplingParams] = {}
        self.checked: Counter[str] = Counter()
        self.breaks = 0
        step = self.worker.paged.step

        def breakable(segments: Any) -> StepOutput:
            if self.breaks:
                self.breaks -= 1
                raise RuntimeError("broken on purpose")
            return step(segments)

        self.worker.paged.step = breakable  # type: ignore[method-assign]  # as a fault would

    @property
    def sessions(self) -> dict[str, Session]:
        return self.worker.scheduler.sessions

    # --- rules -------------------------------------------------------------------------------

    @precondition(lambda self: len(self.sessions) < MOST_SESSIONS)
    @rule(
        length=st.sampled_from(LENGTHS),
        sampling=st.sampled_from(SAMPLINGS),
        new=st.integers(1, 40),
        owner=st.integers(1, 2),
        other=st.booleans(),
    )
    def admit(
        self, length: int, sampling: SamplingParams, new: int, owner: int, other: bool
    ) -> None:
        sid = f"s{len(self.prompts)}"
        prompt = TEXT[:length]
        if other:  # another end, after a shared beginning
            prompt = [*prompt[:-1], (prompt[-1] + 1) % TOKENS]
        self.prompts[sid] = tuple(prompt)
        self.samplings[sid] = sampling
        self.worker.said[sid] = Said()
        self.worker.start(sid, prompt, new, sampling, owner=owner)
        self.tally["admitted"] += 1

    @precondition(lambda self: self.sessions)
    @rule(seed=SEEDS, answered=st.sampled_from((0.5, 1.0, 1.0)))
    def step_with_some_drafts(self, seed: int, answered: float) -> None:
        chance = random.Random(seed)
        for session in self.worker.wanting:
            if chance.random() < answered:
                self.worker.propose(session, self.some_draft(session, chance))
        self.advance()

    @precondition(lambda self: self.sessions)
    @rule(seed=SEEDS)
    def step_with_trees(self, seed: int) -> None:
        chance = random.Random(seed)
        for session in self.worker.wanting:
            self.worker.propose(session, self.tree(session, chance, right=chance.choice((1, 2, 9))))
        self.advance()

    @precondition(lambda self: self.sessions)
    @rule()
    def step_with_right_chains(self) -> None:
        for session in self.worker.wanting:
            assert session.want is not None
            length = session.want.draft_len
            self.worker.propose(session, Draft(tuple(self.path(session, length, length))))
        self.advance()

    @precondition(lambda self: self.sessions)
    @rule(seed=SEEDS)
    def disturb(self, seed: int) -> None:
        chance = random.Random(seed)
        session = chance.choice(list(self.sessions.values()))
        disturbance = chance.choice(
            (
                self.cancel,
                self.begin_again_under_a_higher_epoch,
                self.answer_with_rubbish,
                self.break_a_step_once,
                self.break_a_step_for_its_first_session,
                self.close_owner,
            )
        )
        disturbance(session, chance)
        for other in list(self.sessions.values()):
            if other.drafter is None:  # it was taken away for rubbish
                command = AssignDrafter(
                    session_id=other.session_id, epoch=other.epoch, drafter=DRAFTER
                )
                self.worker.take(self.worker.scheduler.drafts.assign(command))

    def cancel(self, session: Session, chance: random.Random) -> None:
        self.worker.take(self.worker.scheduler.close(session.session_id, session.epoch))
        assert session.session_id not in self.sessions
        self.tally["cancelled"] += 1

    def close_owner(self, session: Session, chance: random.Random) -> None:
        if len(self.sessions) < MOST_SESSIONS:
            return
        self.worker.take(self.worker.scheduler.close_owner(session.owner))
        assert all(other.owner != session.owner for other in self.sessions.values())
        self.tally["owners gone"] += 1

    def begin_again_under_a_higher_epoch(self, session: Session, chance: random.Random) -> None:
        prompt = self.prompts[session.session_id]
        self.worker.start(
            session.session_id,
            prompt,
            session.endings.max_new_tokens,
            session.sampling,
            said=session.tokens[len(prompt) :],
            epoch=session.epoch + 1,
            owner=session.owner,
        )
        self.tally["begun again"] += 1

    def answer_with_rubbish(self, session: Session, chance: random.Random) -> None:
        if session.want is None:
            return
        rubbish = (
            Draft((TOKENS,)),
            Draft((1,) * 9),
            Draft((1, 2), (-1, 1)),
            Draft((1, 1), (-1, -1)),
            Draft(tuple(range(MAX_NODES + 1)), (-1,) * (MAX_NODES + 1)),
        )
        before = self.worker.scheduler.counters.malformed_proposals
        self.worker.propose(session, chance.choice(rubbish))
        assert self.worker.scheduler.counters.malformed_proposals == before + 1
        self.tally["malformed"] += 1

    def break_a_step_once(self, session: Session, chance: random.Random) -> None:
        """Its sessions run again one by one, and nobody is the worse for it."""
        self.breaks = 1
        failed = self.worker.scheduler.counters.failed_sessions
        self.advance()
        assert self.worker.scheduler.counters.failed_sessions == failed
        self.tally["broken"] += 1

    def break_a_step_for_its_first_session(self, session: Session, chance: random.Random) -> None:
        self.breaks = 2
        failed = self.worker.scheduler.counters.failed_sessions
        if self.advance():
            assert self.worker.scheduler.counters.failed_sessions == failed + 1
            self.tally["failed"] += 1

    @precondition(lambda self: self.sessions)
    @rule(seed=SEEDS)
    def look_into_the_kv(self, seed: int) -> None:
        """What the last committed token sees there is what it sees in plain decoding."""
        session = random.Random(seed).choice(list(self.sessions.values()))
        table = session.table
        if session.pending != 1 or table.kv_len >= len(table.blocks) * BLOCK_TOKENS:
            return
        # Written beyond kv_len, where the next step writes the same.
        copied = BlockTable(list(table.blocks), table.kv_len)
        actual = PagedModel.step(
            self.worker.paged, [Segment(session.tokens[-1:], copied, 1)]
        ).logits
        expected = self.reference.logits(session.tokens)
        torch.testing.assert_close(actual[0, :TOKENS], expected, rtol=1e-3, atol=1e-3)
        self.tally["looked into"] += 1

    # --- what must be so ---------------------------------------------------------------------

    @invariant()
    def counts(self) -> None:
        self.tally["rules"] += 1

    @invariant()
    def says_what_plain_decoding_says(self) -> None:
        for sid, said in self.worker.said.items():
            tokens = [*self.prompts[sid], *said.tokens]
            if sid in self.sessions:
                assert self.sessions[sid].tokens == tokens
            sampling = self.samplings[sid]
            for place in range(len(self.prompts[sid]) + self.checked[sid], len(tokens)):
                expected, margin = self.reference.next(tokens[:place], sampling)
                if tokens[place] != expected:
                    assert margin < NEAR_TIE, (sid, place, tokens[place], expected, margin)
                    self.tally["near ties"] += 1
                self.checked[sid] += 1
                self.tally["tokens"] += 1

    @invariant()
    def kv_and_blocks_add_up(self) -> None:
        pool = self.worker.scheduler.pool
        users: Counter[int] = Counter()
        unsealed: Counter[int] = Counter()
        for session in self.sessions.values():
            table = session.table
            assert table.kv_len <= len(session.tokens) - 1
            assert session.pending >= 1
            assert len(table.blocks) == -(-table.kv_len // BLOCK_TOKENS)
            users.update(table.blocks)
            unsealed.update(table.blocks[table.sealed :])
        # In two hands only what nobody writes to any more.
        assert all(users[block] == 1 for block in unsealed)
        assert all(pool.users(block) == users[block] for block in range(pool.total))
        assert pool.free + len(users) == pool.total
        assert self.worker.scheduler.counters.speculation.acceptance_rate <= 1.0

    def teardown(self) -> None:
        for owner in (1, 2):
            self.worker.take(self.worker.scheduler.close_owner(owner))
        assert self.worker.scheduler.pool.free == BLOCKS
        for said in self.worker.said.values():
            if isinstance(said.ended, SessionFailed):
                assert "broken on purpose" in said.ended.error.message
        counters = self.worker.scheduler.counters
        self.tally["preempted"] += counters.preemptions
        self.tally["adopted"] += counters.prefix_hits
        self.tally["missed"] += counters.missed_proposals

    # --- parts -------------------------------------------------------------------------------

    def advance(self) -> bool:
        stepped = self.worker.step()
        if not stepped:
            self.breaks = 0
            return False
        self.tally["steps"] += 1
        for work in self.worker.plans.pop().work:
            said = self.worker.said[work.session.session_id]
            if work.draft.token_ids and said.progress:
                self.tally["tree" if work.parents else "chain"] += 1
                origins = said.progress[-1].origins
                self.tally["accepted in trees" if work.parents else "accepted"] += len(origins) - 1
                self.tally["rejected"] += origins[-1] is TokenOrigin.RECOVERED
        return True

    def some_draft(self, session: Session, chance: random.Random) -> Draft:
        kind = chance.choice(("empty", "chain", "chain", "tree", "tree", "random"))
        right = chance.randint(0, 4)
        if kind == "empty":
            return Draft()
        if kind == "tree":
            return self.tree(session, chance, right)
        assert session.want is not None
        length = chance.randint(1, session.want.draft_len)
        if kind == "random":
            return Draft(tuple(chance.randrange(TOKENS) for _ in range(length)))
        return Draft(tuple(self.path(session, length, right)))

    def path(self, session: Session, length: int, right: int) -> list[int]:
        """A draft that is right for so many tokens and then wrong."""
        path = self.reference.continuation(session.tokens, length, session.sampling)
        return [*path[:right], *((token + 1) % TOKENS for token in path[right:])]

    def tree(self, session: Session, chance: random.Random, right: int) -> Draft:
        """The path somewhere in a random tree, in any order that parents allow."""
        assert session.want is not None
        path = self.path(session, chance.randint(1, session.want.draft_len), right)
        leaves = chance.randint(0, MAX_NODES - len(path))
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        end = -1
        for on_path in chance.sample(
            [True, False], counts=[len(path), leaves], k=leaves + len(path)
        ):
            parent = end if on_path else chance.randrange(-1, len(tokens))
            token = path.pop(0) if on_path else chance.randrange(TOKENS)
            depth = 1 if parent < 0 else depths[parent] + 1
            twins = [n for n, of in enumerate(parents) if (of, tokens[n]) == (parent, token)]
            if twins:
                node = twins[0]
            elif depth <= session.want.draft_len:
                node = len(tokens)
                tokens.append(token)
                parents.append(parent)
                depths.append(depth)
            else:
                continue
            end = node if on_path else end
        return Draft(tuple(tokens), tuple(parents))


# 20 s of processor time, but two thousand steps feel every other process on the machine.
@pytest.mark.timeout(600)
def test_random_steps_say_what_plain_decoding_says(tmp_path: Path) -> None:
    path = save_model(tmp_path)
    model, reference, tally = load_model(str(path)), Reference(path), Counter[str]()
    # What breaks on purpose is logged with its traceback.
    with structlog.testing.capture_logs():
        run_state_machine_as_test(
            lambda: Machine(model, reference, tally),
            settings=settings(
                max_examples=RUNS,
                stateful_step_count=RULES_OF_A_RUN,
                deadline=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),
            ),
        )
    assert tally["rules"] >= 2000
    # Nothing was left out, and rounding hardly ever decided.
    for what in WHAT_HAPPENS:
        assert tally[what] >= 5, (what, tally)
    assert tally["near ties"] <= tally["tokens"] / 1000
