"""How the worker says that its engine works: to health checks."""

import asyncio

from draft_worker.engine import Engine
from outrider import logs, rpc


async def keep_liveness(server: rpc.Server, engine: Engine, silence_s: float) -> None:
    """Say to health checks whether the engine works, until cancelled; it ticks its clock, too.

    It does not once it has said nothing for `silence_s` or longer while it had something to do.
    """
    log = logs.get(__name__)
    alive = False
    while True:
        engine.awake.tick()
        hangs = engine.pulse.silent_s >= silence_s
        if alive is hangs:
            alive = not hangs
            await server.set_alive(alive)
            if hangs:
                log.error("the engine hangs", silent_s=round(engine.pulse.silent_s, 1))
        await asyncio.sleep(engine.awake.tick_s)
