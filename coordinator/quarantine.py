"""Draft workers that sent rubbish, and how long nobody is given to them."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from outrider.session.registry import WorkerRecord

FIRST_S = 10.0
# Each quarantine doubles the next one; after as long without another one all is forgotten.
LONGEST_S = 600.0


@dataclass(frozen=True, slots=True)
class _Term:
    seconds: float
    until: float


class Quarantine:
    """Keeps draft workers by (worker id, incarnation); a new incarnation starts clean."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._terms: dict[tuple[str, str], _Term] = {}

    def add(self, worker: WorkerRecord) -> float | None:
        """Shut a worker out; for how many seconds, or None if it is out already."""
        if self.holds(worker):
            return None
        now, key = self._clock(), (worker.worker_id, worker.incarnation)
        self._terms = {k: t for k, t in self._terms.items() if now < t.until + LONGEST_S}
        last = self._terms.get(key)
        seconds = min(2 * last.seconds, LONGEST_S) if last else FIRST_S
        self._terms[key] = _Term(seconds, now + seconds)
        return seconds

    def holds(self, worker: WorkerRecord) -> bool:
        """Whether a worker is shut out now."""
        term = self._terms.get((worker.worker_id, worker.incarnation))
        return term is not None and self._clock() < term.until

    @property
    def workers(self) -> set[tuple[str, str]]:
        """All that are shut out now."""
        now = self._clock()
        return {key for key, term in self._terms.items() if now < term.until}
