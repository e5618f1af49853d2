"""The engine: a thread that takes messages, steps the scheduler, and hands out what follows.

Everything else talks to it through `post` (from any thread) and `publish` (called in the
engine's thread). Messages are handled between steps, in order.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from outrider import logs
from outrider.clock import AwakeClock
from outrider.errors import InternalError, OutriderError, RankLostError
from outrider.messages import (
    AssignDrafter,
    CloseSession,
    DecodeCommand,
    DraftEvent,
    DraftFailed,
    Proposal,
    StartSession,
)
from outrider.pulse import Pulse
from verify_worker.scheduler import Scheduler
from verify_worker.state import Outcome, Output, Plan
from verify_worker.tracing import SessionSpans

_LOG = logs.get(__name__)
_LEAST_WAIT_S = 0.001
# How often `clock` has to tick while the engine runs.
TICK_S = 0.25
# How often the ranks of a split target are met while there is nothing to run.
MEET_S = 1.0


@dataclass(frozen=True, slots=True)
class FromCoordinator:
    """A command that came on the Decode stream `owner`."""

    owner: int
    command: DecodeCommand


@dataclass(frozen=True, slots=True)
class OwnerGone:
    """The Decode stream `owner` ended."""

    owner: int


@dataclass(frozen=True, slots=True)
class FromDrafter:
    """An event of a draft worker; one that could not be read is an error."""

    worker_id: str
    event: DraftEvent | OutriderError


@dataclass(frozen=True, slots=True)
class DrafterGone:
    """The stream to a draft worker broke."""

    worker_id: str
    error: OutriderError


@dataclass(frozen=True, slots=True)
class Drain:
    """Tell when no session is left."""

    done: Future[None]


Message = FromCoordinator | OwnerGone | FromDrafter | DrafterGone | Drain


class StepRunner(Protocol):
    """What runs a plan; `verify_worker.runner.Runner` with a real model."""

    def run(self, plan: Plan) -> Outcome:
        """One forward pass and its verdicts."""
        ...


class OtherRanks(Protocol):
    """The other ranks of a split target; `outrider.model.parallel.leader.ParallelModel`."""

    # Called in each step as soon as they have what it takes.
    on_sent: Callable[[], None]

    def pulse(self) -> None:
        """Make sure that all are there, or raise."""
        ...


class Engine:
    """One scheduler and one runner in one thread.

    `finished` is done when the thread has ended, and carries the exception when that was a
    fault. `pulse` tells whether it hangs, as long as somebody ticks `awake`. `ranks` are there
    where the target is split: then what came of a step is published once the others have the next.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        publish: Callable[[Sequence[Output]], None],
        spans: SessionSpans,
        clock: Callable[[], float] = time.monotonic,
        ranks: OtherRanks | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.finished: Future[None] = Future()
        self.awake = AwakeClock(TICK_S)
        self.pulse = Pulse(self.awake)
        self._runner = runner
        self._publish = publish
        self._spans = spans
        self._clock = clock
        self._ranks = ranks
        self._held: list[Output] = []
        self._met_at_s = clock()
        self._inbox: queue.SimpleQueue[tuple[float, Message | None]] = queue.SimpleQueue()
        self._drains: list[Future[None]] = []
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        if ranks is not None:
            ranks.on_sent = self._tell_held

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def post(self, message: Message) -> None:
        """Give the engine a message; from any thread, never blocks."""
        # What comes during a step is handled after it, and came when it came.
        self._inbox.put((self._clock(), message))

    def drained(self) -> Future[None]:
        """Done once no session is left."""
        done: Future[None] = Future()
        self.post(Drain(done))
        return done

    def stop(self, timeout_s: float | None = None) -> bool:
        """End the thread after the running step; False if that takes longer than `timeout_s`."""
        self._inbox.put((self._clock(), None))
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            try:
                self._loop()
            finally:
                self._tell_held()
        except BaseException as fault:
            _LOG.exception("the engine failed")
            self.finished.set_exception(fault)
        else:
            self.finished.set_result(None)

    def _loop(self) -> None:
        plan: Plan | None = None
        while True:
            outputs: list[Output] = []
            for came_at_s, message in self._take(wait=plan is None):
                if message is None:
                    return
                outputs += self._handle(message, came_at_s)
            self._hold(outputs)
            self.pulse.begin()
            plan = self.scheduler.plan(self._clock())
            if plan is not None:
                self.pulse.begin(self.scheduler.cost.seconds(plan.shape))
                outputs = self._step(plan)
                self._tell_held()  # if the step did not get that far
                self._hold(outputs)
            else:
                self._tell_held()
            if self._drains and not self.scheduler.sessions:
                self._tell_held()
                self._drains.pop().set_result(None)

    def _hold(self, outputs: list[Output]) -> None:
        """Publish beside the next step of the other ranks, which wait for its message; or now."""
        self._held += outputs
        if self._ranks is None:
            self._tell_held()

    def _tell_held(self) -> None:
        outputs, self._held = self._held, []
        if outputs:
            self._spans.observe(outputs)
            self._publish(outputs)

    def _take(self, *, wait: bool) -> list[tuple[float, Message | None]]:
        """All messages that are there; with `wait`, until there is one or a session wakes."""
        taken: list[tuple[float, Message | None]] = []
        timeout = None
        if wait:
            now_s = self._clock()
            if self._ranks is not None and now_s - self._met_at_s >= MEET_S:
                self._ranks.pulse()
                self._met_at_s = self._clock()
            wake_at = self.scheduler.wake_at_s(now_s)
            if self._ranks is not None:
                wake_at = min(self._met_at_s + MEET_S, wake_at or math.inf)
            # A session can be due and still have to wait for blocks: no spinning meanwhile.
            timeout = None if wake_at is None else max(wake_at - now_s, _LEAST_WAIT_S)
            self.pulse.rest()
        try:
            taken.append(self._inbox.get(block=wait, timeout=timeout))
            self.pulse.begin()
            while True:
                taken.append(self._inbox.get_nowait())
        except queue.Empty:
            return taken

    def _step(self, plan: Plan) -> list[Output]:
        self.scheduler.reserve(plan)
        try:
            outcome = self._runner.run(plan)
        except RankLostError:
            raise  # the worker ends with its ranks; its sessions go on elsewhere
        except Exception as error:
            _LOG.exception("runner failed")
            failure = InternalError(f"the verify worker failed: {error}")
            outcome = Outcome((failure,) * len(plan.work), 0.0)
        self._met_at_s = self._clock()
        return self.scheduler.apply(plan, outcome, self._clock())

    def _handle(self, message: Message, came_at_s: float) -> list[Output]:
        scheduler = self.scheduler
        match message:
            case FromCoordinator(owner, StartSession() as command):
                return scheduler.start(self._spans.begin(command), owner)
            case FromCoordinator(_, CloseSession(session_id=session_id, epoch=epoch)):
                self._spans.end(session_id)
                return scheduler.close(session_id, epoch)
            case FromCoordinator(_, AssignDrafter() as command):
                return scheduler.drafts.assign(command)
            case OwnerGone(owner):
                return scheduler.close_owner(owner)
            case FromDrafter(worker_id, Proposal() as proposal):
                return scheduler.drafts.receive(worker_id, proposal, came_at_s)
            case FromDrafter(worker_id, DraftFailed() as failure):
                return scheduler.drafts.failed(worker_id, failure)
            case FromDrafter(worker_id, OutriderError() as fault):
                return scheduler.drafts.malformed(worker_id, fault.message)
            case DrafterGone(worker_id, error):
                return scheduler.drafts.lose(worker_id, error)
            case Drain(done):
                self._drains.append(done)
                return []
        raise AssertionError(f"unhandled message {message!r}")
