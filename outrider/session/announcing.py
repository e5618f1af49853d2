"""A worker's side of the registry: it keeps itself announced, and is told when to drain."""

import asyncio
from collections.abc import Awaitable, Callable

from outrider import logs
from outrider.errors import RecordsUnavailableError
from outrider.session.registry import HEARTBEATS_PER_TTL, Registry, WorkerRecord


class Announcer:
    """Announces what `read` gives three times per `ttl_s` of the registry, and withdraws it.

    `obey` is called when somebody has told the worker to drain (True) or to serve again (False)
    and its record says otherwise. `announced` is set from the first announcement on.
    """

    def __init__(
        self,
        registry: Registry,
        read: Callable[[], WorkerRecord],
        obey: Callable[[bool], Awaitable[None]] | None = None,
    ) -> None:
        self.announced = asyncio.Event()
        self._registry = registry
        self._read = read
        self._obey = obey
        self._again = asyncio.Event()
        self._log = logs.get(__name__)

    def changed(self) -> None:
        """Announce at once: what `read` gives has changed."""
        self._again.set()

    async def run(self, stop: asyncio.Event) -> None:
        """Keep announced until `stop`; while Redis does not answer, keep trying."""
        lost = False
        try:
            while not stop.is_set():
                self._again.clear()
                try:
                    await self._announce()
                except RecordsUnavailableError as error:
                    if not lost:
                        self._log.warning("can't announce", error=error.message)
                    lost = True
                else:
                    if lost:
                        self._log.info("announced again")
                    lost = False
                await self._wait(stop)
        finally:
            try:
                await self._registry.withdraw(self._read())
            except RecordsUnavailableError as error:
                self._log.warning("can't withdraw; the record will expire", error=error.message)

    async def _announce(self) -> None:
        record = self._read()
        order = await self._registry.announce(record)
        self.announced.set()
        if self._obey is not None and order is not None and order is not record.draining:
            await self._obey(order)
            if self._read().draining is order:
                self.changed()  # whoever gave the order waits to see it

    async def _wait(self, stop: asyncio.Event) -> None:
        waits = [asyncio.create_task(event.wait()) for event in (stop, self._again)]
        try:
            await asyncio.wait(
                waits,
                timeout=self._registry.ttl_s / HEARTBEATS_PER_TTL,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
