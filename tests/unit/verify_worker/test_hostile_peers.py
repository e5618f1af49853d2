"""A session decodes as if it were alone, whatever else comes on the streams of the worker."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import wire
from outrider.errors import InvalidRequestError
from outrider.messages import (
    CommitDraft,
    Draft,
    DrafterLost,
    DraftWorkerRef,
    Endings,
    OpenDraft,
    Progress,
    Proposal,
    SamplingParams,
    SessionFailed,
    StartSession,
)
from outrider.model.blocks import BlockPool
from outrider.pb.v1 import draft_pb2, verify_pb2
from tests.support.random_messages import messages
from tests.support.synthetic import VOCABULARY, SyntheticRunner, plain_decoding
from verify_worker.engine import Engine, FromCoordinator, FromDrafter, Message
from verify_worker.scheduler import Limits, Scheduler
from verify_worker.state import LeaveDrafter, Output, ToCoordinator, ToDrafter
from verify_worker.tracing import SessionSpans

PROMPT = tuple(range(1, 8))
NEW = 24
GOOD, BAD = DraftWorkerRef("good", "good:1"), DraftWorkerRef("bad", "bad:1")


class World:
    """An engine that is stepped by hand, with one session that nobody else names."""

    def __init__(self, drafter: DraftWorkerRef) -> None:
        scheduler = Scheduler(BlockPool(64), Limits(context_len=128, vocab_size=VOCABULARY))
        self.now_s = 0.0
        self.engine = Engine(
            scheduler, SyntheticRunner(), lambda _: None, SessionSpans(), lambda: self.now_s
        )
        self.tokens: list[int] = []
        self.left: list[str] = []
        start = StartSession(
            session_id="mine",
            epoch=1,
            token_ids=PROMPT,
            prompt_len=len(PROMPT),
            sampling=SamplingParams(),
            endings=Endings(NEW),
            drafter=drafter,
        )
        self.take(FromCoordinator(1, start))

    def take(self, message: Message) -> None:
        self.observe(self.engine._handle(message, self.now_s))

    def step(self) -> None:
        plan = self.engine.scheduler.plan(self.now_s)
        if plan is not None:
            self.observe(self.engine._step(plan))
        self.now_s += 0.01

    def observe(self, outputs: list[Output]) -> None:
        for output in outputs:
            match output:
                case ToCoordinator(1, event):
                    assert not isinstance(event, SessionFailed), event
                    if isinstance(event, Progress):
                        self.tokens += event.token_ids
                    if isinstance(event, DrafterLost):
                        self.left.append(event.worker_id)
                case ToDrafter(drafter, OpenDraft() | CommitDraft() as command):
                    if drafter == GOOD and command.draft_len:
                        self.answer(command.draft_len)
                case LeaveDrafter(worker_id):
                    assert worker_id == BAD.worker_id

    def answer(self, draft_len: int) -> None:
        committed = [*PROMPT, *self.tokens]
        proposal = Proposal(
            session_id="mine",
            epoch=1,
            base_len=len(committed),
            draft=Draft(tuple(plain_decoding(committed, draft_len))),
        )
        self.engine.post(FromDrafter("good", proposal))

    def finish(self) -> None:
        for _ in range(2000):
            if len(self.tokens) >= NEW:
                break
            while not self.engine._inbox.empty():
                _, message = self.engine._inbox.get_nowait()
                assert message is not None
                self.take(message)
            self.step()
        assert self.tokens == plain_decoding(PROMPT, NEW)


@settings(deadline=None, max_examples=60)
@given(st.lists(messages(verify_pb2.DecodeCommand), max_size=12))
def test_commands_of_another_coordinator(commands: list[verify_pb2.DecodeCommand]) -> None:
    world = World(GOOD)
    for pb in commands:
        try:
            world.take(FromCoordinator(2, wire.decode_command_from_pb(pb)))
        except InvalidRequestError:
            continue
        world.step()
    world.finish()


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_events_of_the_draft_worker_of_the_session(data: st.DataObject) -> None:
    world = World(BAD)
    for _ in range(data.draw(st.integers(0, 12))):
        pb = data.draw(messages(draft_pb2.DraftEvent))
        if data.draw(st.booleans()):
            # What is right but for the draft itself is what gets furthest.
            pb.session_id, pb.epoch = "mine", 1
            pb.proposal.base_len = len(PROMPT) + len(world.tokens)
        try:
            event = wire.draft_event_from_pb(pb)
        except InvalidRequestError as error:
            world.take(FromDrafter("bad", error))
        else:
            world.take(FromDrafter("bad", event))
        world.step()
    world.finish()
    counters = world.engine.scheduler.counters
    if counters.malformed_proposals >= 3:
        assert "bad" in world.left


@pytest.mark.parametrize(
    "draft",
    [
        Draft((VOCABULARY,)),
        Draft((2**32 - 1,)),
        Draft((1,) * 17),
        Draft((1, 2), (-1, 1)),
        Draft((1, 1), (-1, -1)),
    ],
    ids=["id = vocabulary size", "id = -1", "too many", "parent forward", "twice"],
)
def test_a_draft_worker_that_goes_on_sending_rubbish_is_left(draft: Draft) -> None:
    world = World(BAD)
    sent = 0
    for _ in range(500):
        world.step()
        if world.left:
            break
        want = world.engine.scheduler.sessions["mine"].want
        if want is not None:
            base_len = len(PROMPT) + len(world.tokens)
            proposal = Proposal(session_id="mine", epoch=1, base_len=base_len, draft=draft)
            world.take(FromDrafter("bad", proposal))
            sent += 1
    assert world.left == ["bad"]
    assert sent == world.engine.scheduler.counters.malformed_proposals == 3
    world.finish()
