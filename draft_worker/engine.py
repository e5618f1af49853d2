"""The thread that drafts; the gRPC side only exchanges messages with it.

    inbox  commands and ends of streams, in the order in which they came
    turn   take everything in, then let the drafter work once for all that is wanted

While the drafter works, commands pile up in the inbox; taken in together, only the latest
want of each session survives. That is how a slow drafter catches up.
"""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TypeAlias

from draft_worker.figures import Figures
from draft_worker.scheduler import Addressed, Scheduler
from outrider import logs
from outrider.clock import AwakeClock
from outrider.drafting.base import Drafter
from outrider.errors import UnavailableError
from outrider.messages import DraftCommand, DraftEvent
from outrider.pulse import Pulse

# How often `awake` has to tick while the engine runs.
TICK_S = 0.25
Emit: TypeAlias = Callable[[Sequence[DraftEvent]], None]


@dataclass(frozen=True, slots=True)
class _StreamOpened:
    stream: int
    emit: Emit


@dataclass(frozen=True, slots=True)
class _Commands:
    """With the time at which they came: they may lie in the inbox for a whole call."""

    stream: int
    commands: Sequence[DraftCommand]
    since: float


@dataclass(frozen=True, slots=True)
class _StreamClosed:
    stream: int


@dataclass(frozen=True, slots=True)
class _Refuse:
    refuse: bool


@dataclass(frozen=True, slots=True)
class _Drain:
    done: Future[None]


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Message: TypeAlias = _StreamOpened | _Commands | _StreamClosed | _Refuse | _Drain | _Stop


class Engine:
    """Drafts for all streams in a thread of its own.

    Every method is safe in any thread and returns at once, except `stop`. `finished` is done when
    the thread has ended, and carries the exception when that was a fault. `pulse` tells whether it
    hangs, as long as somebody ticks `awake`.
    """

    def __init__(self, drafter: Drafter, *, max_sessions: int) -> None:
        self.figures = Figures()
        self.finished: Future[None] = Future()
        self.awake = AwakeClock(TICK_S)
        self.pulse = Pulse(self.awake)
        self._drafter = drafter
        self._scheduler = Scheduler(drafter, self.figures, max_sessions=max_sessions)
        self._inbox: SimpleQueue[_Message] = SimpleQueue()
        self._emits: dict[int, Emit] = {}
        self._drains: list[Future[None]] = []
        self._stream_ids = itertools.count()
        # Not a daemon: a thread inside torch must not be torn down with the interpreter.
        self._thread = threading.Thread(target=self._run, name="draft-engine")
        self._log = logs.get(__name__)

    @property
    def kv_blocks(self) -> tuple[int, int]:
        """KV blocks of the drafter that are free, and all of them."""
        return self._drafter.kv_blocks

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the batch in hand, and wait for it."""
        self._inbox.put(_Stop())
        if self._thread.is_alive():
            self._thread.join()

    def refuse(self, refuse: bool) -> None:
        """Open no sessions from now on, or some again; running ones go on."""
        self._inbox.put(_Refuse(refuse))

    def drain(self) -> Future[None]:
        """Open no sessions from now on; done once none is left."""
        self.refuse(True)
        done: Future[None] = Future()
        self._inbox.put(_Drain(done))
        return done

    def open_stream(self, emit: Emit) -> int:
        """A new stream; `emit` gets its events, in the engine's thread, and must not block.

        Raises:
            UnavailableError: the engine has ended.
        """
        if self.finished.done():
            raise UnavailableError("the engine of this draft worker has ended; use another one")
        stream = next(self._stream_ids)
        self._inbox.put(_StreamOpened(stream, emit))
        return stream

    def submit(self, stream: int, commands: Sequence[DraftCommand]) -> None:
        """Commands that came on the stream."""
        self._inbox.put(_Commands(stream, commands, time.monotonic()))

    def close_stream(self, stream: int) -> None:
        """End the sessions of the stream; nothing is emitted for it afterwards."""
        self._inbox.put(_StreamClosed(stream))

    def _run(self) -> None:
        try:
            while self._take_in():
                if self._scheduler.has_wants:
                    self.pulse.begin()
                    self._send(self._scheduler.answer())
                while self._drains and self._scheduler.is_drained:
                    self._drains.pop().set_result(None)
            for stream in list(self._emits):
                self._scheduler.close_stream(stream)
            self.finished.set_result(None)
        except Exception as fault:
            self._log.exception("the engine failed")
            self.finished.set_exception(fault)

    def _take_in(self) -> bool:
        """Take in all that has come, waiting for it when nothing is wanted; False to stop."""
        running = True
        wait = not self._scheduler.has_wants
        if wait:
            self.pulse.rest()
        while True:
            try:
                message = self._inbox.get(block=wait)
            except Empty:
                return running
            if wait:
                self.pulse.begin()
            wait = False
            match message:
                case _StreamOpened(stream, emit):
                    self._emits[stream] = emit
                case _Commands(stream, commands, since):
                    # A frame that was still on its way when its stream was closed opens nothing.
                    for command in commands if stream in self._emits else ():
                        self._send(self._scheduler.apply(stream, command, since))
                case _StreamClosed(stream):
                    self._emits.pop(stream, None)
                    self._scheduler.close_stream(stream)
                case _Refuse(refuse):
                    self._scheduler.refuse(refuse)
                case _Drain(done):
                    self._drains.append(done)
                case _Stop():
                    running = False

    def _send(self, events: Sequence[Addressed]) -> None:
        by_stream: dict[int, list[DraftEvent]] = {}
        for stream, event in events:
            by_stream.setdefault(stream, []).append(event)
        for stream, batch in by_stream.items():
            emit = self._emits.get(stream)
            if emit is not None:
                emit(batch)
