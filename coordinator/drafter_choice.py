"""Which draft worker a session has, which ones it lost, and who comes next."""

import time

from coordinator.pool import WorkerPool
from outrider.errors import InvalidRequestError
from outrider.messages import AcceptanceRule, DrafterLost, DraftWorkerRef, SpeculationOptions
from outrider.session.registry import WorkerRecord

# A draft worker that was lost may be tried again after this long.
RETRY_S = 5.0


class DrafterChoice:
    """The draft worker of one session; `held` is None while it has none."""

    def __init__(self, pool: WorkerPool, speculation: SpeculationOptions) -> None:
        self.held: WorkerRecord | None = None
        self._pool = pool
        self._speculation = speculation
        # When the session lost each (draft worker, incarnation).
        self._lost: dict[tuple[str, str], float] = {}

    @property
    def worker_id(self) -> str:
        """The draft worker's id; "" for none."""
        return self.held.worker_id if self.held else ""

    @property
    def ref(self) -> DraftWorkerRef | None:
        """The draft worker as it is named to a verify worker."""
        return self._pool.ref(self.held) if self.held else None

    @property
    def is_bad(self) -> bool:
        """Whether it has one that nobody should have."""
        return self.held is not None and self._pool.is_quarantined(self.held)

    @property
    def is_good(self) -> bool:
        """Whether it has one that is up."""
        return self.held is not None and self._pool.is_up(self.held) and not self.is_bad

    def take(self, drafter: WorkerRecord | None) -> None:
        """Have another one, or none."""
        drafted = self._pool.drafted
        if self.held is not None:
            drafted[self.held.worker_id] -= 1
        if drafter is not None:
            drafted[drafter.worker_id] += 1
        self.held = drafter

    def choose(self) -> WorkerRecord | None:
        """The best one to take now, if there is any."""
        if not self._speculation.enabled:
            return None
        now = time.monotonic()
        recent = {key for key, lost_at in self._lost.items() if now - lost_at < RETRY_S}
        # Under the rejection rule a q that is not what it says would bend the law of the output.
        trusted_only = self._speculation.rule is AcceptanceRule.REJECTION
        return self._pool.choose_draft_worker(recent, trusted_only=trusted_only)

    def note_lost(self, event: DrafterLost) -> bool:
        """Note that the session lost one; False when it has another one by now."""
        lost = self.held
        if lost is None or lost.worker_id != event.worker_id:
            return False
        self._lost[lost.worker_id, lost.incarnation] = time.monotonic()
        if isinstance(event.error, InvalidRequestError):
            self._pool.quarantine(lost, event.error.message)
        return True
