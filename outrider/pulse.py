"""Whether the engine is alive, and not only the process around it.

The engine's thread says when it begins something and when it has nothing to do; what it began is
expected to take so long. From then on it is silent: a forward pass that hangs looks like
that, and a long prefill does not, because the cost of its steps is known.
"""

from outrider.clock import AwakeClock

# A step may take so many times as long as it should, before that is silence.
PATIENCE = 4.0


class Pulse:
    """What the engine last said of itself; written by its thread, read by any."""

    def __init__(self, clock: AwakeClock) -> None:
        self._clock = clock
        # When it should have been heard again; None while it has nothing to do.
        self._due_s: float | None = None

    def begin(self, expected_s: float = 0.0) -> None:
        """It does something that should take `expected_s`."""
        self._due_s = self._clock.seconds + PATIENCE * expected_s

    def rest(self) -> None:
        """It waits for messages."""
        self._due_s = None

    @property
    def silent_s(self) -> float:
        """Seconds for which it should have been heard and was not."""
        due_s = self._due_s
        return 0.0 if due_s is None else max(self._clock.seconds - due_s, 0.0)
