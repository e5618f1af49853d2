"""Is the engine alive? A thread that hangs in a step is told from one that has nothing to do."""

import threading

from outrider.clock import AwakeClock
from outrider.messages import Endings, SamplingParams, StartSession
from outrider.model.blocks import BlockPool
from outrider.pulse import PATIENCE, Pulse
from tests.support.synthetic import VOCABULARY, SyntheticRunner
from verify_worker.engine import Engine, FromCoordinator
from verify_worker.scheduler import Limits, Scheduler
from verify_worker.state import Outcome, Plan
from verify_worker.tracing import SessionSpans

# How long a step of one row should take before one was measured.
FIRST_STEP_S = 0.5


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.clock = AwakeClock(10.0, lambda: self.now)
        self.pulse = Pulse(self.clock)

    def silent_after(self, seconds: float) -> float:
        self.now += seconds
        self.clock.tick()
        return self.pulse.silent_s


def test_silence_begins_when_a_step_should_have_been_done() -> None:
    world = World()
    world.pulse.begin()
    assert world.silent_after(3.0) == 3.0
    world.pulse.begin(expected_s=2.0)
    assert world.silent_after(2.0 * PATIENCE) == 0.0
    assert world.silent_after(1.5) == 1.5
    world.pulse.begin()
    assert world.pulse.silent_s == 0.0


def test_one_that_rests_is_not_silent() -> None:
    world = World()
    assert world.silent_after(9.0) == 0.0
    world.pulse.begin()
    world.pulse.rest()
    assert world.silent_after(9.0) == 0.0


class HangingRunner(SyntheticRunner):
    """Hangs in its first step until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs, self.let_go = threading.Event(), threading.Event()

    def run(self, plan: Plan) -> Outcome:
        self.hangs.set()
        self.let_go.wait(60)
        return super().run(plan)


def test_an_engine_that_hangs_in_a_step_is_silent_until_it_goes_on() -> None:
    world, runner = World(), HangingRunner()
    scheduler = Scheduler(BlockPool(32), Limits(context_len=256, vocab_size=VOCABULARY))
    engine = Engine(scheduler, runner, lambda outputs: None, SessionSpans())
    engine.awake = world.clock
    engine.pulse = world.pulse
    engine.start()
    try:
        start = StartSession(
            session_id="s",
            epoch=1,
            token_ids=(1,),
            prompt_len=1,
            sampling=SamplingParams(),
            endings=Endings(8),
        )
        engine.post(FromCoordinator(1, start))
        assert runner.hangs.wait(30)
        assert world.silent_after(PATIENCE * FIRST_STEP_S) == 0.0
        assert world.silent_after(7.0) == 7.0
        assert not engine.stop(timeout_s=0.01)
    finally:
        runner.let_go.set()
    engine.finished.result(30)
