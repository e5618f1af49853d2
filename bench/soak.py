"""Everything is killed, stopped, cut off and slowed down at random, and every completion goes on.

Two of everything on tiny models and a Valkey. First the completions run undisturbed and
plainly; then again with speculation, while a seeded schedule of outages goes over the cluster.
"""

import asyncio
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from bench.cluster import Cluster
from bench.load import LETTERS, Load
from bench.outages import Outage, inflict, schedule
from bench.paced_worker import paced
from bench.report import Bar, Report, progress
from bench.tiny import write_model
from bench.workers import holdings, running_records
from outrider.client import AsyncClient, Retry
from outrider.config import setting
from outrider.local.commands import StackSettings

# Longer than any outage: a client that gives up would be a failure here.
RETRY = Retry(start_s=120.0, resume_s=120.0)
SETTLE_S = 30.0


@dataclass(frozen=True, slots=True)
class Settings:
    """How much, how bad."""

    generations: int = setting(200, at_least=1, help="Requests; every eighth has two completions.")
    at_once: int = setting(8, at_least=1, help="Requests at once.")
    new_tokens: int = setting(64, at_least=1, help="Most tokens of a completion.")
    pace_s: float = setting(0.03, at_least=0, help="Least seconds of a step.")
    seed: int = setting(0, help="Of the schedule.")
    longest_s: float = setting(3.0, at_least=0.1, help="Longest time that an outage lasts.")
    longest_gap_s: float = setting(1.5, at_least=0, help="Longest time between two outages.")
    least_outages: int = setting(
        0, at_least=0, help="Ask again from the first request on until there were so many."
    )
    bar: bool = setting(False, help="Exit with 1 when a completion fails or differs.")


@dataclass(slots=True)
class Outcome:
    """How the disturbed run went; `outages` are those that were over before it was."""

    load: Load
    expected: Load
    outages: list[Outage] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    running: list[str] = field(default_factory=list)

    @property
    def differing(self) -> list[int]:
        """The requests that said something else than undisturbed."""
        said = self.load.said
        wanted, different = self.expected.said, self.load.different
        return [number for number in said if said[number] != wanted.get(number % different)]


async def disturb(cluster: Cluster, settings: Settings, outcome: Outcome) -> None:
    """One outage after another, until cancelled."""
    outages = schedule(
        settings.seed,
        cluster,
        longest_s=settings.longest_s,
        longest_gap_s=settings.longest_gap_s,
    )
    for outage in outages:
        await asyncio.sleep(outage.gap_s)
        progress(f"{outage}; {len(outcome.load.said)} done")
        inflicting = asyncio.create_task(inflict(cluster, outage))
        try:
            await asyncio.shield(inflicting)
        except asyncio.CancelledError:
            # Not before what was broken is mended: it would be mended twice.
            await inflicting
            raise
        outcome.outages.append(outage)


async def measure(settings: Settings) -> Outcome:
    """The whole run.

    Raises:
        UnavailableError: the cluster did not start, or did not come back at the end.
    """
    with tempfile.TemporaryDirectory(prefix="outrider-soak-") as directory:
        model = write_model(Path(directory), letters=LETTERS, end=True)
        stack = StackSettings(model=str(model), threads=1, numerics="invariant", drain_s=5.0)
        paces = paced(("verify-1", "verify-2"), settings.pace_s)
        async with Cluster(stack, stand_ins=paces, report=progress) as cluster:
            return await _measure(settings, cluster)


async def _measure(settings: Settings, cluster: Cluster) -> Outcome:
    expected = Load(settings.new_tokens, settings.generations)
    outcome = Outcome(Load(settings.new_tokens, settings.generations), expected)

    def numbers() -> Iterator[int]:
        for number in count():
            if number >= settings.generations and len(outcome.outages) >= settings.least_outages:
                return
            yield number

    async with AsyncExitStack() as exit_stack:
        # Each coordinator is the first choice of one of them.
        clients = [
            await exit_stack.enter_async_context(AsyncClient(addresses, retry=RETRY))
            for addresses in (cluster.addresses, cluster.addresses[::-1])
        ]
        every = range(settings.generations)
        await outcome.expected.run(clients, every, at_once=4 * settings.at_once, speculation=False)
        progress(f"undisturbed: {len(outcome.expected.said)} done")
        disturbing = asyncio.create_task(disturb(cluster, settings, outcome))
        running = asyncio.create_task(
            outcome.load.run(clients, numbers(), at_once=settings.at_once)
        )
        await asyncio.wait({disturbing, running}, return_when=asyncio.FIRST_COMPLETED)
        if disturbing.done():
            disturbing.result()  # it never ends by itself: this raises
        await running
        disturbing.cancel()
        with suppress(asyncio.CancelledError):
            await disturbing
        await _mend(cluster)
        outcome.held, outcome.running = await _left(clients[0], cluster)
    return outcome


async def _mend(cluster: Cluster) -> None:
    """Start what is down and wait until all is well."""
    for link in cluster.links.values():
        link.release()
        link.delay_s = 0.0
    for name in (*cluster.services, "valkey"):
        cluster.go_on(name)
        if not cluster.process(name).running:
            await cluster.start_process(name)
    await cluster.ready()


async def _left(client: AsyncClient, cluster: Cluster) -> tuple[list[str], list[str]]:
    """Who holds something, and which records say running, once it has all come to rest."""
    held: list[str] = []
    running: list[str] = []
    with suppress(TimeoutError):
        async with asyncio.timeout(SETTLE_S):
            while True:
                held = [str(h) for h in await holdings(client) if not h.idle]
                running = await running_records(cluster.redis_url)
                if not held and not running:
                    break
                await asyncio.sleep(0.2)
    return held, running


def report_of(outcome: Outcome) -> Report:
    """The table and the bars."""
    load, wanted = outcome.load, outcome.expected
    report = Report("Soak", ["what", "value"])
    requests = len(load.said) + len(load.failed)
    kinds = Counter(outage.kind.value for outage in outcome.outages)
    report.rows += [
        ["requests", requests],
        ["finished", len(load.said)],
        ["streams taken up again", load.reconnects],
        ["outages", len(outcome.outages)],
        *([f"  {kind}", kinds[kind]] for kind in sorted(kinds)),
    ]
    report.figures = {
        "requests": requests,
        "finished": len(load.said),
        "reconnects": load.reconnects,
        "outages": len(outcome.outages),
        "by_kind": dict(kinds),
    }
    first = next(iter({**load.failed, **wanted.failed}.items()), "")
    report.bars = [
        Bar("every request finishes", not load.failed and not wanted.failed, f"{first}"),
        Bar("each says what it said undisturbed", not outcome.differing, f"{outcome.differing}"),
        Bar("no gap and no token twice in a stream", not load.torn, f"{load.torn}"),
        Bar("nothing is held at the end", not outcome.held, "; ".join(outcome.held)),
        Bar("no record says running", not outcome.running, ", ".join(outcome.running)),
    ]
    return report


def run(settings: Settings) -> None:
    """Kill, stop, cut off and slow down everything at random under load."""
    report = report_of(asyncio.run(measure(settings)))
    report.print()
    report.exit(enforce=settings.bar)
