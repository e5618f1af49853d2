import threading
import time
from collections.abc import Iterator, Sequence
from queue import SimpleQueue

import pytest

from draft_worker.engine import Engine
from draft_worker.scheduler import Scheduler
from outrider.drafting.base import DraftRequest
from outrider.drafting.ngram import NgramDrafter
from outrider.errors import UnavailableError
from outrider.messages import (
    CloseDraft,
    CommitDraft,
    Draft,
    DraftCommand,
    DraftEvent,
    OpenDraft,
    Proposal,
    SamplingParams,
)

DEADLINE_S = 20


class GatedDrafter(NgramDrafter):
    """Says when it begins to propose, and then waits to be let on."""

    def __init__(self) -> None:
        super().__init__(ngram_min=1, ngram_max=2)
        self.begun: SimpleQueue[list[str]] = SimpleQueue()
        self.gate: SimpleQueue[None] = SimpleQueue()

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        self.begun.put([request.session_id for request in requests])
        self.gate.get(timeout=DEADLINE_S)
        return super().propose(requests)


class Stream:
    """A stream whose events are read one by one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._events: SimpleQueue[DraftEvent] = SimpleQueue()
        self.number = engine.open_stream(self._emit)

    def _emit(self, events: Sequence[DraftEvent]) -> None:
        for event in events:
            self._events.put(event)

    def say(self, *commands: DraftCommand) -> None:
        self._engine.submit(self.number, commands)

    def next(self) -> DraftEvent:
        return self._events.get(timeout=DEADLINE_S)

    @property
    def silent(self) -> bool:
        return self._events.empty()


def opened(session_id: str, *token_ids: int) -> OpenDraft:
    return OpenDraft(
        session_id=session_id,
        epoch=1,
        token_ids=token_ids,
        sampling=SamplingParams(),
        draft_len=2,
    )


def committed(session_id: str, base_len: int, *token_ids: int) -> CommitDraft:
    return CommitDraft(
        session_id=session_id, epoch=1, base_len=base_len, token_ids=token_ids, draft_len=2
    )


@pytest.fixture
def drafter() -> GatedDrafter:
    return GatedDrafter()


@pytest.fixture
def engine(drafter: GatedDrafter) -> Iterator[Engine]:
    engine = Engine(drafter, max_sessions=8)
    engine.start()
    yield engine
    for _ in range(8):
        drafter.gate.put(None)
    engine.stop()


def test_events_go_to_the_stream_of_their_session(engine: Engine, drafter: GatedDrafter) -> None:
    first, second = Stream(engine), Stream(engine)
    first.say(opened("s", 1, 2, 1))
    assert drafter.begun.get(timeout=DEADLINE_S) == ["0/s"]
    second.say(opened("s", 1, 3, 1))
    drafter.gate.put(None)
    drafter.gate.put(None)
    for stream, draft in ((first, (2, 1)), (second, (3, 1))):
        event = stream.next()
        assert isinstance(event, Proposal)
        assert event.draft.token_ids == draft
    assert first.silent
    assert second.silent


def test_the_time_in_the_inbox_is_part_of_the_queue(engine: Engine, drafter: GatedDrafter) -> None:
    first, second = Stream(engine), Stream(engine)
    first.say(opened("s", 1, 2, 1))
    drafter.begun.get(timeout=DEADLINE_S)
    second.say(opened("s", 1, 3, 1))
    time.sleep(0.05)  # the drafter is at work for so long
    drafter.gate.put(None)
    drafter.gate.put(None)
    event = second.next()
    assert isinstance(event, Proposal)
    assert event.timings.queue_us >= 50_000


def test_what_comes_while_it_drafts_is_coalesced(engine: Engine, drafter: GatedDrafter) -> None:
    stream = Stream(engine)
    stream.say(opened("a", 1, 2, 1))
    drafter.begun.get(timeout=DEADLINE_S)
    # All of this comes while the drafter works.
    stream.say(committed("a", 3, 5))
    stream.say(committed("a", 4, 6), opened("b", 4, 4))
    stream.say(committed("a", 6 - 1, 1))
    drafter.gate.put(None)
    assert stream.next().session_id == "a"
    assert drafter.begun.get(timeout=DEADLINE_S) == ["0/a", "0/b"]
    drafter.gate.put(None)
    events = [stream.next(), stream.next()]
    assert [(e.session_id, e.base_len) for e in events if isinstance(e, Proposal)] == [
        ("a", 6),
        ("b", 2),
    ]
    assert stream.silent
    assert engine.figures.superseded == 2


def test_a_closed_stream_hears_nothing_more(engine: Engine, drafter: GatedDrafter) -> None:
    gone, stays = Stream(engine), Stream(engine)
    gone.say(opened("s", 1, 2, 1))
    drafter.begun.get(timeout=DEADLINE_S)
    engine.close_stream(gone.number)
    stays.say(opened("s", 1, 3, 1))
    drafter.gate.put(None)
    # This was in hand when the stream was closed.
    assert gone.next().session_id == "s"
    assert drafter.begun.get(timeout=DEADLINE_S) == ["1/s"]
    assert engine.figures.sessions == 1
    gone.say(opened("late", 1, 2, 1))
    drafter.gate.put(None)
    stays.next()
    assert gone.silent


def test_a_command_that_comes_after_its_stream_opens_no_session(engine: Engine) -> None:
    stream = Stream(engine)
    engine.close_stream(stream.number)
    stream.say(opened("late", 1, 2, 3))
    engine.drain().result(timeout=DEADLINE_S)
    assert engine.figures.sessions == 0


def test_drained_waits_for_the_last_session(engine: Engine, drafter: GatedDrafter) -> None:
    stream = Stream(engine)
    stream.say(opened("s", 1, 2, 3))
    drafter.gate.put(None)
    stream.next()
    drained = engine.drain()
    stream.say(committed("s", 3, 4))
    drafter.gate.put(None)
    stream.next()
    assert not drained.done()
    stream.say(CloseDraft(session_id="s", epoch=1))
    drained.result(timeout=DEADLINE_S)


def test_stop_ends_the_thread_and_the_sessions(drafter: GatedDrafter) -> None:
    engine = Engine(drafter, max_sessions=8)
    engine.start()
    stream = Stream(engine)
    stream.say(opened("s", 1, 2, 3))
    drafter.gate.put(None)
    stream.next()
    engine.stop()
    assert engine.finished.result(timeout=0) is None
    assert engine.figures.sessions == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "draft-engine"]
    with pytest.raises(UnavailableError):
        Stream(engine)


def test_a_fault_of_the_engine_itself_is_told(
    drafter: GatedDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Scheduler, stream: int, command: DraftCommand, since: float) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Scheduler, "apply", broken)
    engine = Engine(drafter, max_sessions=8)
    engine.start()
    Stream(engine).say(opened("s", 1))
    with pytest.raises(RuntimeError, match="a bug"):
        engine.finished.result(timeout=DEADLINE_S)
    engine.stop()
