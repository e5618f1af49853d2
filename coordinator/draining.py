"""Workers that are to be stopped: they are told so, and their sessions are moved."""

import asyncio
from collections import Counter
from collections.abc import Iterable

from coordinator.pool import WorkerPool
from coordinator.session import RunningSession
from outrider.errors import NotFoundError, OverloadedError, UnavailableError
from outrider.session.registry import Registry, WorkerRecord

# A worker reads what it is told with its next heartbeat, a second later at most.
OBEY_S = 10.0
LOOK_AGAIN_S = 0.1


class DrainOrders:
    """Tells workers of the pool's group to drain, or to serve again, through the registry."""

    def __init__(self, registry: Registry, pool: WorkerPool) -> None:
        self._registry = registry
        self._pool = pool

    async def give(self, worker_id: str, *, draining: bool) -> int:
        """Tell a worker, and wait until it has obeyed; the sessions that are on it then.

        They are those of all coordinators. One that is gone has none.

        Raises:
            NotFoundError: no such worker is up.
            UnavailableError: it has not obeyed within `OBEY_S`.
            RecordsUnavailableError: Redis does not answer.
        """
        for worker in await self._workers(worker_id):
            await self._registry.order(worker.pool, worker_id, draining=draining)
        try:
            async with asyncio.timeout(OBEY_S):
                while True:
                    workers = await self._workers(worker_id)
                    if all(worker.draining is draining for worker in workers):
                        return sum(self._sessions(worker) for worker in workers)
                    await asyncio.sleep(LOOK_AGAIN_S)
        except NotFoundError:
            return 0  # it left meanwhile
        except TimeoutError:
            raise UnavailableError(
                f"worker {worker_id!r} was told, and has not obeyed within {OBEY_S:g} s; is it "
                "hung, or stopping already?"
            ) from None

    async def _workers(self, worker_id: str) -> list[WorkerRecord]:
        """The workers of that id: one, or one of each pool."""
        listed = await self._registry.list_workers(self._pool.group)
        found = [worker for worker in listed if worker.worker_id == worker_id]
        if not found:
            names = ", ".join(worker.worker_id for worker in listed) or "none"
            raise NotFoundError(f"no worker {worker_id!r} is up; there are: {names}")
        return found

    def _sessions(self, worker: WorkerRecord) -> int:
        # What it has said of itself is late by a heartbeat; of our own we know.
        link = self._pool.links.get(worker.worker_id)
        here = link is not None and link.worker.incarnation == worker.incarnation
        return max(worker.sessions, link.sessions if link is not None and here else 0)


def move_sessions(sessions: Iterable[RunningSession], pool: WorkerPool) -> None:
    """Move sessions off verify workers that drain, as far as others have room for them.

    A session that nobody else can take stays, and may finish where it is.
    """
    moving: Counter[str] = Counter()
    for session in sessions:
        record = session.journal.record
        here = record.verify_worker_id
        if not pool.is_draining(here):
            continue
        try:
            other = pool.choose_link({here}, record.target)
        except OverloadedError:
            continue
        if other is None:
            continue
        there = other.worker
        if other.sessions + moving[there.worker_id] < there.capacity:
            moving[there.worker_id] += 1
            session.move()
