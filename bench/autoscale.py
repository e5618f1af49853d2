"""The draft pool follows the load: real services, the chart's rules, and nobody notices.

A coordinator and a verify worker (a tiny model whose steps take `--pace-s`) serve a load that
goes up, down and away. A controller reads the exported demand every 15 s and starts and stops
real draft workers, each of which drafts 1 / `--token-s` tokens a second, by the algorithm of the
HorizontalPodAutoscaler (or KEDA's rule, from none and back to none) with the values of the chart.
All its times are divided by `--speed`.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import yaml

from bench.cluster import Cluster, Size
from bench.draft_pool import DraftPool
from bench.hpa import Direction, Scaler
from bench.load import LETTERS, Load
from bench.paced_worker import paced
from bench.report import Bar, Report, progress
from bench.scrape import Rate, read_counters
from bench.tiny import write_model, write_noisy
from outrider.client import AsyncClient, Retry
from outrider.config import setting
from outrider.local.commands import Commands, StackSettings
from outrider.local.ports import take_port

VALUES = Path(__file__).resolve().parent.parent / "k8s" / "outrider" / "values.yaml"
# Of the controller and of the chart's rate window.
SYNC_S, WINDOW_S = 15.0, 60.0
DEMAND = "outrider_draft_demand_seconds_total"
WAIT = "outrider_draft_wait_seconds_total"
ACCEPTED = "outrider_spec_decode_num_accepted_tokens_total"
TOKENS = "outrider_generation_tokens_total"
COUNTERS = (DEMAND, WAIT, ACCEPTED, TOKENS)
# Requests that differ; each is asked for plainly first.
DIFFERENT = 12


@dataclass(frozen=True, slots=True)
class Settings:
    """The load, the costs, and the rule."""

    rule: str = setting("hpa", choices=("hpa", "keda"), help="Who owns the number of replicas.")
    load: tuple[int, ...] = setting(
        (1, 6, 2, 0), at_least=0, many=True, help="Sessions at once, phase by phase."
    )
    phase_s: float = setting(75.0, at_least=1, help="Seconds of a phase.")
    pace_s: float = setting(0.06, at_least=0, help="Seconds of a step of the verify worker.")
    token_s: float = setting(0.005, at_least=0, help="Seconds of a draft worker for a token.")
    noise: float = setting(0.0, at_least=0, help="Noise on the weights of the draft model.")
    max_draft_len: int = setting(8, at_least=1, help="Most tokens of a draft.")
    new_tokens: int = setting(96, at_least=1, help="Most tokens of a completion.")
    speed: float = setting(7.5, at_least=1, help="How much faster than in a cluster rules are.")
    plot: str = setting("", env=False, help="File for the plot.")
    bar: bool = setting(False, help="Exit with 1 when a bar is not met.")


@dataclass(slots=True)
class Sample:
    """One look of the controller; `waiting` is how many sessions waited for drafts at once."""

    at_s: float
    load: int
    demand: float
    waiting: float
    replicas: int
    ready: int
    tokens_s: float


@dataclass(slots=True)
class Outcome:
    """What was seen, and what was said undisturbed."""

    samples: list[Sample] = field(default_factory=list)
    expected: Load = field(default_factory=lambda: Load(0, DIFFERENT))
    said: Load = field(default_factory=lambda: Load(0, DIFFERENT))
    failed_workers: list[str] = field(default_factory=list)
    accepted: float = 0.0

    @property
    def different(self) -> list[int]:
        """Requests that said something else than undisturbed."""
        said = self.said.said
        return [n for n in said if said[n] != self.expected.said[n % DIFFERENT]]


def turns(sizes: Sequence[int]) -> int:
    """How often they change their direction."""
    moves = [b - a for a, b in pairwise(sizes) if a != b]
    return sum(a * b < 0 for a, b in pairwise(moves))


def scaler_of(settings: Settings) -> Scaler:
    """The scaler that the chart would make."""
    scaling = yaml.safe_load(VALUES.read_text())["draft"]["autoscaling"]
    keda = settings.rule == "keda"
    return Scaler(
        scaling["target"],
        0 if keda else scaling["minReplicas"],
        scaling["maxReplicas"],
        Direction.of(scaling["behavior"]["scaleUp"], settings.speed),
        Direction.of(scaling["behavior"]["scaleDown"], settings.speed),
        scaling["cooldownSeconds"] / settings.speed,
    )


class Phases:
    """Keeps as many requests running as the phase asks for."""

    def __init__(self, client: AsyncClient, load: Load) -> None:
        self.at_once = 0
        self._client, self._load = client, load
        self._number = 0
        self._running: set[asyncio.Task[None]] = set()

    async def run(self, sizes: Sequence[int], phase_s: float) -> None:
        """All phases, and then until the last request has ended."""
        for self.at_once in sizes:
            until_s = time.monotonic() + phase_s
            while (left_s := until_s - time.monotonic()) > 0:
                while len(self._running) < self.at_once:
                    one = self._load.run([self._client], [self._number], at_once=1)
                    self._number += 1
                    self._running.add(asyncio.create_task(one))
                pending = self._running or {asyncio.create_task(asyncio.sleep(left_s))}
                _, self._running = await asyncio.wait(
                    pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
                )
        if self._running:
            await asyncio.wait(self._running)


class Controller:
    """Looks at the demand, and gives the pool the size that follows from it."""

    def __init__(
        self, settings: Settings, pool: DraftPool, port: int, client: AsyncClient, phases: Phases
    ) -> None:
        self._scaler, self._speed = scaler_of(settings), settings.speed
        self._pool, self._port, self._client, self._phases = pool, port, client, phases
        window_s = WINDOW_S / settings.speed
        self._rates = {name: Rate(window_s) for name in COUNTERS}
        self.samples: list[Sample] = []
        self._began_s = time.monotonic()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            counters = await read_counters(self._port, COUNTERS)
            now_s = time.monotonic()
            rates = {name: rate.add(now_s, counters[name]) for name, rate in self._rates.items()}
            wanted = self._scaler.replicas(now_s, self._pool.size, rates[DEMAND])
            await self._pool.resize(wanted)
            workers = (await self._client.status()).workers
            ready = sum(one.pool == "draft" and not one.draining for one in workers)
            sample = Sample(
                now_s - self._began_s,
                self._phases.at_once,
                rates[DEMAND],
                rates[WAIT],
                self._pool.size,
                ready,
                rates[TOKENS],
            )
            self.samples.append(sample)
            progress(" ".join(f"{key} {value:.2f}" for key, value in asdict(sample).items()))
            await asyncio.sleep(max(0.0, now_s + SYNC_S / self._speed - time.monotonic()))


async def measure(settings: Settings, directory: Path) -> Outcome:
    """Run the load over a pool that follows it."""
    model = write_model(directory / "target", letters=LETTERS, end=True)
    draft = write_noisy(model, directory / "draft", noise=settings.noise)
    port = take_port("127.0.0.1", 0)
    stack = StackSettings(
        model=str(model),
        drafter="model",
        draft_model=str(draft),
        threads=1,
        numerics="invariant",
        verify_flags=(
            *("--metrics-port", str(port)),
            *("--max-draft-len", str(settings.max_draft_len)),
        ),
        start_timeout_s=180.0,
    )
    size = Size(coordinators=1, verify_workers=1, draft_workers=0)
    outcome = Outcome()
    stand_ins = paced(("verify-1",), settings.pace_s)
    async with Cluster(stack, size=size, stand_ins=stand_ins, report=progress) as cluster:
        commands = Commands(stack)

        def command(name: str) -> list[str]:
            base = commands.draft_worker(cluster.redis_url, name)
            return [sys.executable, "-m", "bench.paced_drafter", str(settings.token_s), *base[3:]]

        async with AsyncClient(cluster.addresses, retry=Retry(resume_s=120)) as client:
            for load in (outcome.expected, outcome.said):
                load.new_tokens = settings.new_tokens
            progress("what they say without speculation")
            await outcome.expected.run([client], range(DIFFERENT), at_once=8, speculation=False)
            pool = DraftPool(command, cluster.run_dir)
            phases = Phases(client, outcome.said)
            controller = Controller(settings, pool, port, client, phases)
            await pool.resize(0 if settings.rule == "keda" else 1)
            looking = asyncio.create_task(controller.run())
            try:
                await phases.run(settings.load, settings.phase_s)
                if looking.done():
                    looking.result()
            finally:
                looking.cancel()
                await asyncio.wait([looking])
                outcome.accepted = (await read_counters(port, COUNTERS))[ACCEPTED]
                await pool.close()
            outcome.samples, outcome.failed_workers = controller.samples, pool.failed
    return outcome


def report_of(settings: Settings, outcome: Outcome) -> Report:
    """The table, and what must hold."""
    report = Report(f"The draft pool under {settings.rule}", ("second", *(Sample.__slots__[1:])))
    target = scaler_of(settings).target
    for sample in outcome.samples:
        report.rows.append([round(value, 2) for value in asdict(sample).values()])
    sizes = [sample.replicas for sample in outcome.samples]
    peak = [sample for sample in outcome.samples if sample.load == max(settings.load)]
    # What is wanted at the end of the peak, and the most that was: a pool is made smaller late.
    wanted = sum(sample.demand for sample in peak[-5:]) / len(peak[-5:]) / target
    most = max(sample.demand for sample in peak) / target
    least = 0 if settings.rule == "keda" else 1
    failed, different = len(outcome.said.failed), len(outcome.different)
    report.bars = [
        Bar("no generation failed", not failed, f"{len(outcome.said.said)} went through"),
        Bar("the text is unchanged", not different and not outcome.said.torn),
        Bar(
            "the pool followed",
            wanted - 1 <= peak[-1].replicas <= most + 1,
            f"{peak[-1].replicas} at the peak; {wanted:.1f} wanted, at most {most:.1f}",
        ),
        Bar(
            "it did not flap",
            turns(sizes) <= turns(settings.load),
            f"{turns(sizes)} turns, the load {turns(settings.load)}",
        ),
        Bar("it went back", sizes[-1] == least, f"to {sizes[-1]}"),
        Bar("drafts were accepted", outcome.accepted > 0, f"{outcome.accepted:.0f} tokens"),
        Bar("draft workers ended in order", not outcome.failed_workers),
    ]
    report.figures = {
        "settings": asdict(settings),
        "completions": len(outcome.said.said),
        "failed": list(outcome.said.failed.values())[:5],
        "different": different,
        "turns": turns(sizes),
        "most_replicas": max(sizes),
        "failed_workers": outcome.failed_workers,
        "samples": [asdict(sample) for sample in outcome.samples],
    }
    return report


def run(settings: Settings) -> None:
    """Show the draft pool following its load."""
    with tempfile.TemporaryDirectory(prefix="outrider-autoscale-") as directory:
        outcome = asyncio.run(measure(settings, Path(directory)))
    report = report_of(settings, outcome)
    if settings.plot:
        from bench.autoscale_plot import draw

        figures = json.loads(json.dumps(report.figures))
        draw(figures, Path(settings.plot))
    report.print()
    report.exit(enforce=settings.bar)
