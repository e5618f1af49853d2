"""How the worker says that it is well: to health checks."""

import asyncio
from collections.abc import Callable

from draft_worker.engine import Engine
from outrider import logs, rpc


async def keep_health(
    server: rpc.Server, engine: Engine, welcome: Callable[[], bool], silence_s: float
) -> None:
    """Say to health checks whether new sessions are welcome, and the engine works, until cancelled.

    It does not once it has said nothing for `silence_s` or longer while it had something to do;
    they are not then, nor unless `welcome` says so. It also ticks the engine's clock.
    """
    log = logs.get(__name__)
    serving = alive = False
    while True:
        engine.awake.tick()
        hangs = engine.pulse.silent_s >= silence_s
        if alive is hangs:
            alive = not hangs
            await server.set_alive(alive)
            if hangs:
                log.error("the engine hangs", silent_s=round(engine.pulse.silent_s, 1))
        wanted = not hangs and welcome()
        if wanted is not serving:
            serving = wanted
            await server.set_serving(serving)
        await asyncio.sleep(engine.awake.tick_s)
