"""Who may begin, who waits, and who is told to come back later.

As many sessions run as there is room for; further requests wait in a queue that is bounded in
length and time. Tenants take turns, and the requests of each are served in the order in which
they came, so nobody starves: one for several completions is never overtaken for being large.
Who is resumed goes before who is new, and if all of it can never fit it begins with as much as
can, once that is free. When the queue is full, a tenant with fewer requests in it
gets the place of the last one of the tenant with the most.
"""

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from outrider import telemetry
from outrider.errors import InvalidRequestError, OverloadedError

# What a session is taken to last before one has ended, and what the newest says about others.
FIRST_SESSION_S = 2.0
NEWEST_SHARE = 1 / 16
# What a client is told at least and at most.
RETRY_AFTER_S = (0.2, 30.0)


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """What is allowed at once; 0 sessions is no limit of its own."""

    max_sessions: int = 0
    max_queued: int = 256
    queue_wait_s: float = 30.0
    tenant_sessions: int = 0


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that waits: the future is done once it may begin, with the places that it has."""

    tenant: str
    sessions: int
    granted: asyncio.Future[int] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class _Line:
    """Those who wait, tenant by tenant in turn."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, deque[_Waiting]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def __iter__(self) -> Iterator[_Waiting]:
        """The first of each tenant, beginning with the tenant whose turn it is."""
        return iter([waiting[0] for waiting in self._tenants.values()])

    def count(self, tenant: str) -> int:
        return len(self._tenants.get(tenant, ()))

    def add(self, waiting: _Waiting) -> None:
        self._tenants.setdefault(waiting.tenant, deque()).append(waiting)

    def remove(self, waiting: _Waiting, *, served: bool = False) -> bool:
        """Take one out, if it is there; when it was served the others have their turns first."""
        line = self._tenants.get(waiting.tenant, deque())
        if waiting not in line:
            return False
        line.remove(waiting)
        if not line:
            del self._tenants[waiting.tenant]
        elif served:
            self._tenants.move_to_end(waiting.tenant)
        return True

    def last_of_most(self) -> _Waiting:
        """The last one of the tenant that has most."""
        return max(self._tenants.values(), key=len)[-1]


class Admission:
    """Counts the sessions of this coordinator and lets requests begin.

    `room` tells how many sessions the verify workers take in all, 0 while none is up; call `look`
    when that may have changed.
    """

    def __init__(self, limits: AdmissionLimits, room: Callable[[], int]) -> None:
        self.running = 0
        self.queued = 0
        self._limits = limits
        self._room = room
        self._tenants: Counter[str] = Counter()
        self._resumed, self._new = _Line(), _Line()
        self._session_s = FIRST_SESSION_S
        meter = telemetry.meter(__name__)
        self._refused = meter.create_counter(
            "outrider_requests_refused", description="Requests that were told to come back later."
        )
        self._refused.add(0)
        self._queue_length = meter.create_up_down_counter(
            "outrider_requests_queued", description="Requests that wait for room."
        )
        self._queue_length.add(0)

    @asynccontextmanager
    async def admitted(
        self, tenant: str, sessions: int, *, resumed: bool = False, running: bool = False
    ) -> AsyncIterator[int]:
        """Wait until `sessions` more may run for the tenant, hold their places, and give how many.

        There are fewer places only for who is resumed and can never have as many. Those that are
        `running` here are about to be taken from the call that has them, which can't be waited for.

        Raises:
            InvalidRequestError: a tenant may never have so many that are new.
            OverloadedError: the queue is full, or the wait was in vain.
        """
        line = self._resumed if resumed else self._new
        if running:
            places = self._need(sessions, line)
            self._hold(tenant, places)
        else:
            places = await self._enter(tenant, sessions, line)
        began = time.monotonic()
        try:
            yield places
        finally:
            self._session_s += NEWEST_SHARE * (time.monotonic() - began - self._session_s)
            self._leave(tenant, places)

    def waits(self, tenant: str, sessions: int) -> bool:
        """Whether a new request would have to wait, or be refused."""
        return self._would_wait(tenant, sessions, self._new)

    def check(self, tenant: str, sessions: int) -> None:
        """Refuse now what `admitted` would refuse at once; for before the prompt is read.

        Raises:
            InvalidRequestError, OverloadedError: as `admitted`.
        """
        self._check(tenant, sessions, self._new)

    def _check(self, tenant: str, sessions: int, line: _Line) -> None:
        own = self._limits.tenant_sessions
        if line is self._new and own and sessions > own:
            raise InvalidRequestError(
                f"{sessions} completions at once are more than the {own} sessions that a tenant "
                "may have here"
            )
        if line is self._new and sessions > self._most:
            raise self._overloaded(f"{sessions} sessions at once, where {self._most} fit in all")
        if self._would_wait(tenant, sessions, line) and not self._has_place(tenant, line):
            raise self._overloaded(f"{self.running} sessions run and {self.queued} requests wait")

    def look(self) -> None:
        """Let those begin for whom there is room by now."""
        while (line := self._next_line()) is not None:
            waiting = self._first(line)
            assert waiting is not None
            gone = waiting.granted.cancelled()  # it has yet to notice
            self._dequeue(line, waiting, served=not gone)
            if not gone:
                places = self._need(waiting.sessions, line)
                self._hold(waiting.tenant, places)
                waiting.granted.set_result(places)

    async def _enter(self, tenant: str, sessions: int, line: _Line) -> int:
        self._check(tenant, sessions, line)
        if not self._would_wait(tenant, sessions, line):
            places = self._need(sessions, line)
            self._hold(tenant, places)
            return places
        if self.queued >= self._limits.max_queued:
            self._displace(self._new.last_of_most())
        waiting = _Waiting(tenant, sessions)
        line.add(waiting)
        self.queued += 1
        self._queue_length.add(1)
        try:
            async with asyncio.timeout(self._limits.queue_wait_s):
                return await waiting.granted
        except TimeoutError:
            self._give_up(line, waiting)
            raise self._overloaded(
                f"there was no room within {self._limits.queue_wait_s:g} s"
            ) from None
        except asyncio.CancelledError:
            self._give_up(line, waiting)
            raise

    def _give_up(self, line: _Line, waiting: _Waiting) -> None:
        """Forget one who no longer waits, whatever happened in the same moment."""
        if waiting.granted.cancelled():
            self._dequeue(line, waiting)
            # Those behind it may fit.
            self.look()
        elif waiting.granted.exception() is None:
            self._leave(waiting.tenant, waiting.granted.result())

    def _displace(self, waiting: _Waiting) -> None:
        self._dequeue(self._new, waiting)
        if not waiting.granted.cancelled():
            waiting.granted.set_exception(self._overloaded("others have fewer requests waiting"))

    def _hold(self, tenant: str, sessions: int) -> None:
        self.running += sessions
        self._tenants[tenant] += sessions

    def _leave(self, tenant: str, sessions: int) -> None:
        self.running -= sessions
        self._tenants[tenant] -= sessions
        if not self._tenants[tenant]:
            del self._tenants[tenant]
        self.look()

    def _dequeue(self, line: _Line, waiting: _Waiting, *, served: bool = False) -> None:
        if line.remove(waiting, served=served):
            self.queued -= 1
            self._queue_length.add(-1)

    @property
    def _most(self) -> int:
        """How many sessions may run at once."""
        # While no verify worker is up, as many may wait for one as may wait in the queue.
        room = self._room() or max(self._limits.max_queued, 1)
        return min(room, self._limits.max_sessions or room)

    def _need(self, sessions: int, line: _Line) -> int:
        """The places without which a request does not begin; those of a new one are all."""
        if line is self._new:
            return sessions
        # It can't be refused for good any more, and there may never be room for all of it.
        return min(sessions, self._most, self._limits.tenant_sessions or sessions)

    def _fits_tenant(self, tenant: str, sessions: int) -> bool:
        own = self._limits.tenant_sessions
        return not own or self._tenants[tenant] + sessions <= own

    def _would_wait(self, tenant: str, sessions: int, line: _Line) -> bool:
        """Whether a request has to wait, behind others in its line or for room."""
        places = self._need(sessions, line)
        if self.running + places > self._most or not self._fits_tenant(tenant, places):
            return True
        ahead = (self._resumed,) if line is self._resumed else (self._resumed, self._new)
        return any(self._first(one) is not None or one.count(tenant) for one in ahead)

    def _has_place(self, tenant: str, line: _Line) -> bool:
        """Whether the queue takes one more, or one of those who are new has to make room."""
        if self.queued < self._limits.max_queued:
            return True
        if not self._new:
            return False
        most = self._new.last_of_most().tenant
        return line is self._resumed or self._new.count(tenant) + 1 < self._new.count(most)

    def _first(self, line: _Line) -> _Waiting | None:
        """Whose turn it is; tenants that have all that they may have are left out."""
        most = self._most
        for waiting in line:
            places = self._need(waiting.sessions, line)
            if places <= most and self._fits_tenant(waiting.tenant, places):
                return waiting
        return None

    def _next_line(self) -> _Line | None:
        """The line whose first one can begin now; nobody overtakes who has yet to fit."""
        for line in (self._resumed, self._new):
            first = self._first(line)
            if first is not None:
                places = self._need(first.sessions, line)
                return line if self.running + places <= self._most else None
        return None

    def _overloaded(self, why: str) -> OverloadedError:
        self._refused.add(1)
        turns = (self.queued + 1) / max(self._most, 1)
        least, most = RETRY_AFTER_S
        retry_after_s = min(max(self._session_s * turns, least), most)
        return OverloadedError(
            f"this coordinator is full: {why}; try again in {retry_after_s:.1f} s or at another "
            "coordinator",
            retry_after_s=retry_after_s,
        )
