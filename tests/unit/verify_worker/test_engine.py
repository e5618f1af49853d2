import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest

from outrider.errors import RankLostError
from outrider.messages import (
    CloseSession,
    Draft,
    Endings,
    FinishReason,
    Heartbeat,
    Progress,
    Proposal,
    SamplingParams,
    SessionEnded,
    StartSession,
)
from outrider.model.blocks import BlockPool
from tests.support.scheduling import DRAFTER
from tests.support.synthetic import VOCABULARY, SyntheticRunner, plain_decoding
from verify_worker.engine import Engine, FromCoordinator, FromDrafter, OwnerGone
from verify_worker.scheduler import Limits, Scheduler
from verify_worker.state import Outcome, Output, Plan, ToCoordinator, ToDrafter
from verify_worker.streams import MOST_EVENTS, Streams
from verify_worker.tracing import SessionSpans

PROMPT = tuple(range(1, 8))


class Ranks:
    """Other ranks, of which one is gone when they are met for the second time."""

    def __init__(self) -> None:
        self.met = 0
        self.on_sent: Callable[[], None] = lambda: None

    def pulse(self) -> None:
        """Meet them."""
        self.met += 1
        if self.met == 2:
            raise RankLostError("rank 1 is gone")


class HeldRunner(SyntheticRunner):
    """A runner whose steps from the second on wait until the test lets them go on, or fail.

    It tells `ranks`, if there are any, that each has begun.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        super().__init__()
        self.ranks = ranks
        self.send, self.sent = threading.Event(), threading.Event()
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.fault: Exception | None = None

    def run(self, plan: Plan) -> Outcome:
        """One step, in the end."""
        if self.rows_of_steps:
            self.begun.set()
            if self.ranks is not None and not self.sent.is_set():
                assert self.send.wait(30)
                self.ranks.on_sent()
                self.sent.set()
            assert self.go_on.wait(30)
            if self.fault is not None:
                raise self.fault
        return super().run(plan)


class Host:
    """An engine in its thread, and what it publishes."""

    def __init__(self, runner: SyntheticRunner | None = None, ranks: Ranks | None = None) -> None:
        scheduler = Scheduler(BlockPool(32), Limits(context_len=256, vocab_size=VOCABULARY))
        self.tokens: list[int] = []
        self.ended = threading.Event()
        runner = runner or SyntheticRunner()
        self.engine = Engine(scheduler, runner, self.publish, SessionSpans(), ranks=ranks)
        self.engine.start()

    def start(self, new: int = 20, *, drafts: bool = True) -> None:
        command = StartSession(
            session_id="s",
            epoch=1,
            token_ids=PROMPT,
            prompt_len=len(PROMPT),
            sampling=SamplingParams(),
            endings=Endings(new),
            drafter=DRAFTER if drafts else None,
        )
        self.engine.post(FromCoordinator(1, command))

    def publish(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            if isinstance(output, ToDrafter):
                self.draft(output)
            elif isinstance(output, ToCoordinator) and isinstance(output.event, Progress):
                self.tokens.extend(output.event.token_ids)
            elif isinstance(output, ToCoordinator) and isinstance(output.event, SessionEnded):
                self.ended.set()

    def draft(self, output: ToDrafter) -> None:
        wanted = getattr(output.command, "draft_len", 0)
        if not wanted:
            return
        committed = [*PROMPT, *self.tokens]
        proposal = Proposal(
            session_id="s",
            epoch=1,
            base_len=len(committed),
            draft=Draft(tuple(plain_decoding(committed, wanted))),
        )
        self.engine.post(FromDrafter("d1", proposal))


def test_a_session_with_drafts_through_the_thread() -> None:
    host = Host()
    host.start()
    assert host.ended.wait(30)
    assert host.tokens == plain_decoding(PROMPT, 20)
    assert host.engine.scheduler.counters.speculation.acceptance_rate == 1.0
    host.engine.drained().result(30)
    host.engine.stop()
    assert host.engine.finished.exception() is None


@pytest.mark.parametrize("fault", [None, RankLostError("rank 1 is gone")], ids=["well", "lost"])
def test_a_step_is_published_while_the_next_computes_whatever_becomes_of_that(
    fault: Exception | None,
) -> None:
    runner = HeldRunner()
    runner.fault = fault
    host = Host(runner)
    host.start()
    assert runner.begun.wait(30)
    said = list(host.tokens)
    assert said == plain_decoding(PROMPT, 20)[: len(said)] != []
    runner.go_on.set()
    if fault is not None:
        assert host.engine.finished.exception(30) is fault
        assert host.tokens == said
        return
    assert host.ended.wait(30)
    assert host.tokens == plain_decoding(PROMPT, 20)
    host.engine.stop()


def test_with_other_ranks_a_step_is_published_once_they_have_the_next() -> None:
    ranks = Ranks()
    runner = HeldRunner(ranks)
    host = Host(runner, ranks)
    host.start(drafts=False)
    assert runner.begun.wait(30)
    assert host.tokens == []
    runner.send.set()
    assert runner.sent.wait(30)
    assert host.tokens == plain_decoding(PROMPT, 20)[: len(host.tokens)] != []
    runner.go_on.set()
    # Nothing follows the last step, which is published all the same.
    assert host.ended.wait(30)
    assert host.tokens == plain_decoding(PROMPT, 20)
    host.engine.stop()


def test_with_other_ranks_a_step_is_published_though_the_next_never_reaches_them() -> None:
    ranks = Ranks()
    runner = HeldRunner()
    runner.fault = RankLostError("rank 1 is gone")
    runner.go_on.set()
    host = Host(runner, ranks)
    host.start(drafts=False)
    assert host.engine.finished.exception(30) is runner.fault
    assert host.tokens == plain_decoding(PROMPT, 20)[: len(host.tokens)] != []


@pytest.mark.parametrize(
    "message",
    [FromCoordinator(1, CloseSession(session_id="s", epoch=1)), OwnerGone(1)],
    ids=["close", "owner gone"],
)
def test_drained_once_the_last_session_is_closed(message: FromCoordinator | OwnerGone) -> None:
    host = Host()
    host.start(new=200)
    drained = host.engine.drained()
    host.engine.post(message)
    drained.result(30)
    pool = host.engine.scheduler.pool
    assert pool.free == pool.total
    host.engine.stop()


def test_a_fault_of_the_engine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()

    def broken(*_: object) -> None:
        raise RuntimeError("a bug in the scheduler")

    monkeypatch.setattr(host.engine.scheduler, "start", broken)
    host.start()
    assert isinstance(host.engine.finished.exception(30), RuntimeError)


async def test_a_stream_that_nobody_reads_ends() -> None:
    streams = Streams()
    number = streams.open()
    event = SessionEnded(session_id="s", epoch=1, reason=FinishReason.STOP)
    for _ in range(MOST_EVENTS):
        streams.put(number, event)
    async with asyncio.timeout(30):
        frame = await streams.next_frame(number)
        assert frame is not None
        assert len(frame.events) == MOST_EVENTS
        for _ in range(MOST_EVENTS + 1):
            streams.put(number, event)
        assert await streams.next_frame(number) is None


async def test_a_stream_on_which_nothing_happens_says_how_the_worker_is() -> None:
    state = Heartbeat(silent_ms=7)
    streams = Streams(lambda: state)
    number = streams.open()
    async with asyncio.timeout(30):
        frame = await streams.next_frame(number)
    assert frame is not None
    assert (len(frame.events), frame.heartbeat.silent_ms, frame.heartbeat.draining) == (0, 7, False)
    state = Heartbeat(draining=True)
    streams.put(number, SessionEnded(session_id="s", epoch=1, reason=FinishReason.STOP))
    frame = await streams.next_frame(number)
    assert frame is not None
    assert (len(frame.events), frame.heartbeat.silent_ms, frame.heartbeat.draining) == (1, 0, True)


def test_ranks_are_met_while_there_is_nothing_to_run_and_a_lost_one_ends_the_engine() -> None:
    ranks = Ranks()
    scheduler = Scheduler(BlockPool(32), Limits(context_len=256, vocab_size=VOCABULARY))
    engine = Engine(scheduler, SyntheticRunner(), list, SessionSpans(), ranks=ranks)
    engine.start()
    with pytest.raises(RankLostError, match="rank 1 is gone"):
        engine.finished.result(timeout=60)
    assert ranks.met == 2
