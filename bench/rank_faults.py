"""From the loss of a rank to the next token of the sessions that it had, and until it is back.

Two verify workers are up: one is split over the two nodes of a Ray cluster that is simulated on
this machine, the other is whole. Its rank on the far node is killed (SIGKILL) or stopped (SIGSTOP)
while it waits in a sum in the midst of a step (`mid_step_worker`). Streams go on at the other
worker; the group starts anew and serves again.
"""

import asyncio
import signal
import statistics
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench.cluster import Cluster, Size
from bench.failover import LETTERS, Streams, Trial
from bench.failover import Settings as StreamSettings
from bench.mid_step_worker import LOST, hit_in_mid_step
from bench.ray_nodes import events, placed, two_nodes
from bench.report import Bar, Report, progress
from bench.rounds import Spread
from bench.tiny import write_model
from outrider.client import AsyncClient
from outrider.config import setting
from outrider.local.commands import StackSettings

SPLIT, WHOLE = "verify-1", "verify-2"
KILLED, STOPPED = "rank killed", "rank stopped"
POLL_S, HIT_POLL_S = 0.05, 0.002


@dataclass(frozen=True, slots=True)
class Settings:
    """How often, and under what."""

    faults: int = setting(3, at_least=1, help="Times that a rank is killed, and stopped.")
    sessions: int = setting(8, at_least=1, help="Streams at once.")
    new_tokens: int = setting(160, at_least=8, help="Tokens of a completion.")
    pace_s: float = setting(0.03, at_least=0, help="Least seconds of a step.")
    rank_timeout_s: float = setting(2.0, at_least=0.5, help="As of the verify worker.")
    bar: bool = setting(False, help="Exit with 1 when a stream ends or a token takes too long.")
    most_s: float = setting(15.0, at_least=0, help="The bar: median to the next token, in seconds.")


class RankTrial(Trial):
    """Loses a rank at a time, and times what follows."""

    def __init__(self, cluster: Cluster, streams: Streams, fault: Path) -> None:
        """`fault` is where the split worker looks in mid-step."""
        super().__init__(cluster, streams)
        self.back_s: dict[str, list[float]] = {KILLED: [], STOPPED: []}
        self._workers, self._fault = cluster, fault

    async def rank(self, what: str) -> None:
        """Lose the rank on the far node, and wait until the worker has a new group."""
        log = self._workers.run_dir / f"{SPLIT}.log"
        serving = len(events(log, "serving"))
        victims = await self._on(SPLIT)
        number = signal.SIGKILL if what == KILLED else signal.SIGSTOP
        lost = len(events(log, LOST))
        hit_in_mid_step(self._fault, placed(log)[1].pid, number)
        while True:
            await asyncio.sleep(HIT_POLL_S)
            if not self._fault.exists():
                break
        since = time.monotonic()
        timing = asyncio.create_task(self._time(what, victims, since))
        while True:
            await asyncio.sleep(POLL_S)
            if len(events(log, "serving")) > serving:
                break
        self.back_s[what].append(time.monotonic() - since)
        progress(f"{what}: back after {self.back_s[what][-1]:.1f} s")
        await timing
        await self._workers.ready()
        collectives = [entry["collective"] for entry in events(log, LOST)[lost:]]
        assert collectives == [2], f"it was to be lost in a step's second sum: {collectives}"


async def measure(settings: Settings, model: Path, ray_address: str) -> Report:
    """The whole run."""
    flags = (
        *("--tensor-parallel-size", "2", "--ray-address", ray_address),
        *("--ray-strategy", "spread", "--rank-timeout-s", str(settings.rank_timeout_s)),
    )
    fault, pace = model.parent / "fault", str(settings.pace_s)
    cluster = Cluster(
        StackSettings(model=str(model), threads=1, verify_flags=("--forward", "lean")),
        size=Size(coordinators=1, draft_workers=1),
        stand_ins={
            SPLIT: ("bench.mid_step_worker", pace, str(fault), *flags),
            WHOLE: ("bench.paced_worker", pace),
        },
        report=progress,
    )
    load = StreamSettings(sessions=settings.sessions, new_tokens=settings.new_tokens)
    async with cluster:
        streams = Streams(cluster, load, LETTERS)
        trial = RankTrial(cluster, streams, fault)
        running = asyncio.create_task(streams.run())
        try:
            for _ in range(settings.faults):
                for what in (KILLED, STOPPED):
                    await trial.rank(what)
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
        await _served_by_both(cluster)
    return report_of(settings, trial, streams)


async def _served_by_both(cluster: Cluster) -> None:
    """Both workers are up at the end."""
    async with AsyncClient(cluster.addresses) as client:
        up = {w.worker_id for w in (await client.status()).workers if w.connected}
    assert {SPLIT, WHOLE} <= up


def report_of(settings: Settings, trial: RankTrial, streams: Streams) -> Report:
    """Medians over the faults of the median over a fault's sessions."""
    report = Report(
        "After the loss of a rank, s: median (quartiles)",
        ["", "times", "next token", "worst", "group is back"],
    )
    for what, seconds in trial.seconds.items():
        spread, back = Spread.of(seconds), Spread.of(trial.back_s[what])
        report.rows.append([what, spread.count, spread, max(seconds), back])
        report.figures[what] = {"next_s": seconds, "back_s": trial.back_s[what]}
        met = statistics.median(seconds) <= settings.most_s
        report.bars.append(Bar(f"{what}: next token within {settings.most_s:g} s", met))
    report.rows.append(["streams that ended well", streams.finished, "", "", ""])
    report.bars.append(Bar("no stream failed", not streams.failed, "; ".join(streams.failed[:3])))
    return report


def run(settings: Settings) -> None:
    """Time from the loss of a rank to the next token, and until its group is back."""
    with tempfile.TemporaryDirectory(prefix="outrider-ranks-") as directory, two_nodes() as ray:
        model = write_model(Path(directory) / "model", letters=LETTERS)
        report = asyncio.run(measure(settings, model, ray))
    report.print()
    report.exit(enforce=settings.bar)
