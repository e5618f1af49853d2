"""What can go wrong in a cluster, and a seeded schedule of it."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from bench.cluster import VALKEY, Cluster

SLOW_S = 0.05


class Kind(Enum):
    """What happens; the value says it to people."""

    KILL = "killed"
    PAUSE = "stopped for a while"
    CUT = "connections cut"
    HOLD = "network silent for a while"
    SLOW = "network slow for a while"
    RESTARTED = "killed, started with its data"
    EMPTIED = "killed, started empty"
    ROLLED_BACK = "killed, started with older data"


OF_VALKEY = (Kind.RESTARTED, Kind.EMPTIED, Kind.ROLLED_BACK, Kind.PAUSE)
OF_SERVICES = (Kind.KILL, Kind.PAUSE)
OF_LINKS = (Kind.CUT, Kind.HOLD, Kind.SLOW)


@dataclass(frozen=True, slots=True)
class Outage:
    """One fault: `target` is a process or a link; it lasts `seconds`, `gap_s` after the last."""

    kind: Kind
    target: str
    seconds: float
    gap_s: float

    def __str__(self) -> str:
        return f"{self.target} {self.kind.value} ({self.seconds:.1f} s)"


def schedule(
    seed: int, cluster: Cluster, *, longest_s: float, longest_gap_s: float
) -> Iterator[Outage]:
    """Outages without end, the same for the same seed and cluster.

    They are dealt from a shuffled deck of 13, so that every kind comes with each deck: 4 of
    Valkey, 3 of links, 2 of each kind of service.
    """
    chance = random.Random(seed)
    links = cluster.link_names
    while True:
        deck = [(kind, VALKEY) for kind in OF_VALKEY]
        deck += [(kind, chance.choice(links)) for kind in OF_LINKS]
        for pool in (cluster.coordinators, cluster.verify_workers, cluster.draft_workers):
            deck += [(kind, chance.choice(pool)) for kind in OF_SERVICES]
        chance.shuffle(deck)
        for kind, target in deck:
            seconds = chance.uniform(0.1, 1.0) * longest_s
            yield Outage(kind, target, seconds, chance.uniform(0.0, longest_gap_s))


async def inflict(cluster: Cluster, outage: Outage) -> None:
    """Let it happen, wait until it is over, and mend it; a killed service is starting then."""
    target, seconds = outage.target, outage.seconds
    match outage.kind:
        case Kind.KILL:
            await cluster.kill(target)
            await asyncio.sleep(seconds)
            await cluster.start_process(target)
        case Kind.PAUSE:
            cluster.pause(target)
            try:
                await asyncio.sleep(seconds)
            finally:
                cluster.go_on(target)
        case Kind.CUT:
            cluster.links[target].cut()
        case Kind.HOLD:
            cluster.links[target].hold()
            try:
                await asyncio.sleep(seconds)
            finally:
                cluster.links[target].release()
        case Kind.SLOW:
            cluster.links[target].delay_s = SLOW_S
            try:
                await asyncio.sleep(seconds)
            finally:
                cluster.links[target].delay_s = 0.0
        case Kind.RESTARTED:
            await cluster.kill(VALKEY)
            await asyncio.sleep(seconds)
            await cluster.start_process(VALKEY)
        case Kind.EMPTIED:
            await cluster.empty_valkey()
        case Kind.ROLLED_BACK:
            cluster.save_valkey("older")
            await asyncio.sleep(seconds)
            await cluster.restore_valkey("older")
