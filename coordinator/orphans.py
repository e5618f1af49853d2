"""Finds the sessions of coordinators that are gone and pauses them, for whoever resumes them."""

import time

from outrider import logs
from outrider.errors import RecordsUnavailableError
from outrider.session.leases import pause_orphans
from outrider.session.record_calls import RecordCalls
from outrider.session.redis import Redis

LOOK_S = 5.0
# A lease that ended is given so long, as its owner may only be slow.
GRACE_S = 10.0


class OrphanSweep:
    """Looks once in `LOOK_S` seconds; every coordinator does so, for the sessions of all."""

    def __init__(self, redis: Redis, calls: RecordCalls, *, grace_s: float = GRACE_S) -> None:
        self._redis = redis
        self._calls = calls
        self._grace_s = grace_s
        self._looked_at = float("-inf")
        self._log = logs.get(__name__)

    async def look(self) -> None:
        """Pause what was left behind, if it is time to look."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        try:
            paused = await pause_orphans(self._redis, self._calls, grace_s=self._grace_s)
        except RecordsUnavailableError as error:
            self._log.warning("can't look for sessions left behind", error=error.message)
            return
        for session_id in paused:
            self._log.info("paused a session whose coordinator is gone", session_id=session_id)
