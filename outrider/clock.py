"""A clock that stands still while this process does.

A process that was stopped for a while (SIGSTOP, a machine that was suspended or starved) wakes
to find that nobody has said anything for as long. That is no fault of the others, so what
waits for a sign of life measures the silence on a clock that ran only while it could listen.
"""

import time
from collections.abc import Callable


class AwakeClock:
    """Seconds during which this process ran, as far as its ticks tell.

    Somebody has to `tick` at least every `tick_s`; a tick that comes later counts as much as
    twice that. `seconds` can be read from any thread.
    """

    def __init__(self, tick_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.tick_s = tick_s
        self.seconds = 0.0
        self._clock = clock
        self._ticked_at = clock()

    def tick(self) -> float:
        """Count the time since the last tick; the seconds so far."""
        now = self._clock()
        self.seconds += min(now - self._ticked_at, 2 * self.tick_s)
        self._ticked_at = now
        return self.seconds
