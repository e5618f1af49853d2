"""How the worker says that it is well: in every frame to coordinators, and to health checks."""

import asyncio

from outrider import logs, rpc
from outrider.messages import Heartbeat
from verify_worker.engine import Engine
from verify_worker.servicer import Identity


def heartbeat(engine: Engine, identity: Identity) -> Heartbeat:
    """What coordinators are told."""
    return Heartbeat(int(engine.pulse.silent_s * 1000), identity.draining)


async def keep_health(
    server: rpc.Server, engine: Engine, identity: Identity, silence_s: float
) -> None:
    """Say to health checks whether new sessions are welcome, and the engine works, until cancelled.

    It does not while it hangs for `silence_s` or longer; they are not then, nor while the worker
    drains. It also ticks the engine's clock.
    """
    log = logs.get(__name__)
    serving = alive = False
    while True:
        engine.awake.tick()
        hangs = engine.pulse.silent_s >= silence_s
        if alive is hangs:
            alive = not hangs
            await server.set_alive(alive)
        wanted = not hangs and not identity.draining
        if wanted is not serving:
            serving = wanted
            await server.set_serving(serving)
            if hangs:
                log.error("the engine hangs", silent_s=round(engine.pulse.silent_s, 1))
        await asyncio.sleep(engine.awake.tick_s)
