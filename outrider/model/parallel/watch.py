"""Notices that a device waits for a rank that is lost.

A step is queued on a device long before it is done. Whatever copies from the device then waits
for all of it, for ever where another rank is gone or stands still, and no time limit of ours ends
such a wait. So a thread looks from beside it, and gives the connection up, which ends the wait.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

# How often the thread looks, as a part of the limit.
_LOOKS = 20
# Between two looks of a thread that waits for the device.
_SETTLE_S = 2e-5


class Mark(Protocol):
    """A place in the work that a device was given."""

    def query(self) -> bool:
        """Whether the device has come past it."""
        ...


class Queue(Protocol):
    """The work of a device, in order."""

    def entered(self) -> AbstractContextManager[Any]:
        """Within it the device is the one that this thread uses."""
        ...

    def mark(self) -> Mark:
        """A mark behind all that this thread has given the device."""
        ...


class CudaQueue:
    """What a thread has queued on its stream of one CUDA device, whatever device is current."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def entered(self) -> AbstractContextManager[Any]:
        """The current device is a thread's own: that of another thread does not count here."""
        return torch.cuda.device(self._device)

    def mark(self) -> Mark:
        """An event on the stream."""
        event: Any = torch.cuda.Event  # it has no hints
        mark = event()
        mark.record(torch.cuda.current_stream(self._device))
        found: Mark = mark
        return found


class Watch:
    """Calls `abort`, once, when a device has stood at one of the marks for longer than a limit.

    The time of a mark begins when it is made or when the device has come past the one before,
    whichever is later: what counts is standing still, not how long a step takes. Time in which
    the device was given nothing to do does not count. With a mark behind each collective the limit
    is one on a collective and the computing before it, here and on the rank that is waited for.
    `limit_s` is that outside of `over`, and the thread looks twenty times in it.
    """

    def __init__(
        self,
        queue: Queue,
        abort: Callable[[], None],
        limit_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look_s = limit_s / _LOOKS
        self._queue, self._clock = queue, clock
        self._abort: Callable[[], None] | None = abort
        self._changed = threading.Condition()
        self._marks: deque[Mark] = deque()
        self._since_s = 0.0
        self._now_s = limit_s
        self._expired = self._closed = False
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    @property
    def expired(self) -> bool:
        """Whether the device stood still for too long; what it gives since then means nothing."""
        return self._expired

    @contextmanager
    def over(self, limit_s: float) -> Iterator[None]:
        """Marks count within this, and against that limit; at the end the device is done.

        Returns without that when it `expired`.
        """
        with self._changed:
            self._now_s = limit_s
        try:
            with self._queue.entered():
                yield
                self._settle()
        finally:
            with self._changed:
                self._marks.clear()

    def mark(self) -> Mark:
        """The device has to come as far as it is given work for now."""
        mark = self._queue.mark()
        with self._changed:
            if not self._marks:
                self._since_s = self._clock()
            self._marks.append(mark)
        return mark

    def look(self) -> bool:
        """Take off the marks that the device has passed; whether it is at one for too long.

        The thread does it, and gives the connection up then.
        """
        while True:
            with self._changed:
                if not self._marks:
                    return False
                mark, since_s = self._marks[0], self._since_s
            # Not with the lock, in which the other thread makes marks.
            if not _passed(mark):
                break
            with self._changed:
                if self._marks and self._marks[0] is mark:
                    self._marks.popleft()
                    self._since_s = self._clock()
        with self._changed:
            standing = bool(self._marks) and self._marks[0] is mark
            late = self._clock() - since_s > self._now_s
            # Under the lock: a step that is over by now is not undone.
            self._expired = standing and late
            return self._expired

    def abort(self) -> None:
        """Give the connection up, once; what goes wrong in that is of no interest."""
        with self._changed:
            abort, self._abort = self._abort, None
        if abort is not None:
            try:
                abort()
            except RuntimeError:
                return

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _settle(self) -> None:
        last = self.mark()
        # Not by waiting for it: not even giving up the connection frees every device.
        while not self._expired and not last.query():
            time.sleep(_SETTLE_S)

    def _run(self) -> None:
        while not self.look():
            with self._changed:
                self._changed.wait(self._look_s)
                if self._closed:
                    return
        self.abort()


def _passed(mark: Mark) -> bool:
    try:
        return mark.query()
    except RuntimeError:
        return True  # the device has failed, which its next call tells
