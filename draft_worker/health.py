"""How the worker says that it is well: to health checks."""

import asyncio
from collections.abc import Callable

from draft_worker.engine import Engine
from outrider import logs, rpc


class Health:
    """What health checks are told: whether the engine works, and new sessions are welcome.

    It does not once it has said nothing for `silence_s` or longer while it had something to do;
    they are not then, nor unless `welcome` says so.
    """

    def __init__(
        self, server: rpc.Server, engine: Engine, welcome: Callable[[], bool], silence_s: float
    ) -> None:
        self._server = server
        self._engine = engine
        self._welcome = welcome
        self._silence_s = silence_s
        self._hangs = False
        self._log = logs.get(__name__)

    async def tell(self) -> None:
        """Say how it is now."""
        silent_s = self._engine.pulse.silent_s
        hangs = silent_s >= self._silence_s
        if hangs and not self._hangs:
            self._log.error("the engine hangs", silent_s=round(silent_s, 1))
        self._hangs = hangs
        await self._server.set_alive(not hangs)
        await self._server.set_serving(not hangs and self._welcome())

    async def keep(self) -> None:
        """Say it again and again until cancelled; this also ticks the engine's clock."""
        while True:
            self._engine.awake.tick()
            await self.tell()
            await asyncio.sleep(self._engine.awake.tick_s)
