"""What waiting for drafts costs and saves, on a virtual clock: scheduler and policy are real.

A step takes what a formula says and a proposal takes what is drawn for it, so that a run of
minutes takes seconds and says the same on every machine.
"""

import hashlib
import heapq
import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.report import Bar, Report, progress
from outrider.config import setting
from outrider.messages import (
    CommitDraft,
    Draft,
    DraftWorkerRef,
    Endings,
    Proposal,
    SamplingParams,
    StartSession,
)
from outrider.model.blocks import BlockPool
from outrider.sampling.acceptance import verify_chain
from verify_worker import waiting
from verify_worker.cost import StepShape
from verify_worker.scheduler import Limits, Scheduler
from verify_worker.state import Decided, Outcome, Output, Plan, ToDrafter

DRAFTER = DraftWorkerRef("d", "127.0.0.1:1")
VOCABULARY = 1000
PROMPT_LEN = 32
FOREVER_S = 1e9
# Of one session with one row.
STEP_S = 0.02


@dataclass(frozen=True, slots=True)
class Settings:
    """What to simulate."""

    sessions: tuple[int, ...] = setting((1, 2, 4, 8), many=True, help="Sessions at once.")
    latencies: tuple[float, ...] = setting(
        (0.05, 0.2, 0.5, 0.8, 1.2, 2.0, 4.0, 100.0),
        many=True,
        env=False,
        at_least=0,
        help="Median latency of a proposal, in steps of one session with one row.",
    )
    row_costs: tuple[float, ...] = setting(
        (0.01, 0.05), many=True, env=False, help="What a further row adds to a step, of one."
    )
    acceptance: tuple[float, ...] = setting(
        (0.8, 0.1), many=True, env=False, help="Chance that a draft token is right."
    )
    jitter: float = setting(0.3, at_least=0, help="Deviation of the logarithm of a latency.")
    draft_len: int = setting(4, at_least=1, help="Draft length k.")
    auto: bool = setting(True, help="What is chosen includes the draft length.")
    new_tokens: int = setting(256, at_least=16, help="Tokens of each session.")
    seeds: tuple[int, ...] = setting(
        (101, 102, 103), many=True, env=False, help="Of latencies, noise and right tokens."
    )
    bar: bool = setting(False, help="Exit with 1 when a bar is missed.")


@dataclass(frozen=True, slots=True)
class World:
    """What is the same for all policies: the machine, the draft worker and the requests."""

    sessions: int
    latency_s: float
    row_cost: float
    acceptance: float
    settings: Settings
    seed: int
    step_s: float = STEP_S

    def seconds(self, shape: StepShape) -> float:
        """What a step takes."""
        others = shape.rows - 1
        return self.step_s * (1 + self.row_cost * others + 0.01 * (shape.sessions - 1))


@dataclass(frozen=True, slots=True)
class Policy:
    """How drafts are waited for."""

    name: str
    drafts: bool = True
    wait_s: float = 0.0
    gather: waiting.Gather = waiting.hold_until_s


def never(
    now_s: float,
    ready: StepShape,
    since_s: float,
    awaited: Sequence[waiting.Awaited],
    step_s: Callable[[StepShape], float],
) -> float | None:
    """Step with those that are ready."""
    return None


POLICIES = (
    Policy("plain", drafts=False),
    Policy("never held", gather=never),
    Policy("all wait", wait_s=FOREVER_S, gather=lambda *_: FOREVER_S),
    Policy("chosen"),
)


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second.

    `together`: of all sessions, until the first one ends. `to_the_last`: of all sessions, until
    the last one ends, which also counts how the batch thins out. `slowest`: of the session that
    has the fewest tokens when the first one ends.
    """

    together: float
    to_the_last: float
    slowest: float

    def over(self, other: "Rates") -> "Rates":
        """As multiples of others."""
        return Rates(
            self.together / other.together,
            self.to_the_last / other.to_the_last,
            self.slowest / other.slowest,
        )


@dataclass(slots=True)
class Simulation:
    """One policy in one world."""

    world: World
    policy: Policy
    now_s: float = 0.0
    steps: int = 0
    scheduler: Scheduler = field(init=False)
    _arrivals: list[tuple[float, int, Proposal]] = field(default_factory=list)
    _random: random.Random = field(init=False)
    _order: "itertools.count[int]" = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        settings = self.world.settings
        limits = Limits(
            context_len=4096,
            vocab_size=VOCABULARY,
            draft_len=0 if settings.auto and self.policy.name == "chosen" else settings.draft_len,
            draft_wait_s=self.policy.wait_s,
        )
        blocks = self.world.sessions * (2 + (PROMPT_LEN + settings.new_tokens) // 8)
        self.scheduler = Scheduler(BlockPool(blocks), limits, gather=self.policy.gather)
        self._random = random.Random(self.world.seed)

    def run(self) -> Rates:
        """Run all sessions to their end."""
        tokens = self.world.settings.new_tokens
        for number in range(self.world.sessions):
            command = StartSession(
                session_id=f"{number}",
                epoch=1,
                token_ids=tuple(number + at for at in range(PROMPT_LEN)),
                prompt_len=PROMPT_LEN,
                sampling=SamplingParams(),
                endings=Endings(tokens),
                drafter=DRAFTER if self.policy.drafts else None,
            )
            self._take(self.scheduler.start(command, owner=0))
        while len(self.scheduler.sessions) == self.world.sessions:
            self._turn()
        together = self.scheduler.counters.committed_tokens / self.now_s
        left = [len(s.tokens) - PROMPT_LEN for s in self.scheduler.sessions.values()]
        slowest = min([*left, tokens]) / self.now_s
        while self.scheduler.sessions:
            self._turn()
        return Rates(together, self.world.sessions * tokens / self.now_s, slowest)

    def _turn(self) -> None:
        """What has come, then a step; when there is none, on to what comes next."""
        while self._arrivals and self._arrivals[0][0] <= self.now_s:
            came_at_s, _, proposal = heapq.heappop(self._arrivals)
            self._take(self.scheduler.drafts.receive(DRAFTER.worker_id, proposal, came_at_s))
        plan = self.scheduler.plan(self.now_s)
        if plan is None:
            wake_s = self.scheduler.wake_at_s(self.now_s)
            arrives_s = self._arrivals[0][0] if self._arrivals else FOREVER_S
            self.now_s = min(arrives_s, FOREVER_S if wake_s is None else wake_s)
            return
        self.scheduler.reserve(plan)
        outcome = self._step(plan)
        self.now_s += outcome.compute_s
        self.steps += 1
        self._take(self.scheduler.apply(plan, outcome, self.now_s))

    def _step(self, plan: Plan) -> Outcome:
        seconds = self.world.seconds(plan.shape) * self._random.lognormvariate(0, 0.03)
        results = []
        for work in plan.work:
            tokens, draft = work.session.tokens, work.draft.token_ids
            targets = [_next_token([*tokens, *draft[:at]]) for at in range(len(draft) + 1)]
            results.append(Decided(verify_chain(draft, targets)) if work.decides else None)
        return Outcome(tuple(results), seconds)

    def _take(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            command = output.command if isinstance(output, ToDrafter) else None
            if isinstance(command, CommitDraft) and command.draft_len:
                self._answer(command)

    def _answer(self, command: CommitDraft) -> None:
        """The draft worker's proposal, on its way."""
        tokens = list(self.scheduler.sessions[command.session_id].tokens)
        base_len = len(tokens)
        for _ in range(command.draft_len):
            right = self._random.random() < self.world.acceptance
            tokens.append((_next_token(tokens) + (not right)) % VOCABULARY)
        proposal = Proposal(
            session_id=command.session_id,
            epoch=command.epoch,
            base_len=base_len,
            draft=Draft(tuple(tokens[base_len:])),
        )
        jitter = self._random.lognormvariate(0, self.world.settings.jitter)
        arrival = (self.now_s + self.world.latency_s * jitter, next(self._order), proposal)
        heapq.heappush(self._arrivals, arrival)


def _next_token(tokens: Sequence[int]) -> int:
    """What the target says: a hash of the last tokens and of their number."""
    text = f"{len(tokens)},{tokens[-3:]}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest()) % VOCABULARY


def measure(world: World) -> dict[str, Rates]:
    """Each policy over plain decoding, in one world."""
    rates = {policy.name: Simulation(world, policy).run() for policy in POLICIES}
    return {name: rate.over(rates["plain"]) for name, rate in rates.items()}


def mean(rates: Sequence[Rates]) -> Rates:
    """Of each rate."""
    return Rates(
        statistics.fmean(rate.together for rate in rates),
        statistics.fmean(rate.to_the_last for rate in rates),
        statistics.fmean(rate.slowest for rate in rates),
    )


def simulate(settings: Settings) -> Report:
    """Every policy in every world."""
    names = [policy.name for policy in POLICIES]
    report = Report(
        f"Tokens per second over plain decoding, k = {settings.draft_len}, "
        f"mean of {len(settings.seeds)} seeds",
        [
            *("acceptance", "row cost", "sessions", "latency in steps", *names[1:]),
            *("over the best", "to the last token", "slowest session"),
        ],
    )
    chosen: list[Rates] = []
    single: list[float] = []
    against_best: list[float] = []
    worlds = itertools.product(
        settings.acceptance, settings.row_costs, settings.sessions, settings.latencies
    )
    for acceptance, row_cost, sessions, latency in worlds:
        runs = [
            measure(World(sessions, STEP_S * latency, row_cost, acceptance, settings, seed))
            for seed in settings.seeds
        ]
        means = {name: mean([run[name] for run in runs]) for name in names}
        best = max(rate.together for name, rate in means.items() if name != "chosen")
        single += [run["chosen"].together for run in runs]
        chosen.append(means["chosen"])
        against_best.append(chosen[-1].together / best)
        report.rows.append(
            [
                *(acceptance, row_cost, sessions, latency),
                *(means[name].together for name in names[1:]),
                *(against_best[-1], chosen[-1].to_the_last, chosen[-1].slowest),
            ]
        )
        progress(f"{len(report.rows)} worlds")
    near = statistics.fmean(ratio >= 0.9 for ratio in against_best)
    least = min(rate.together for rate in chosen)
    report.figures = {
        "least_over_plain": least,
        "least_over_plain_in_a_single_run": min(single),
        "least_over_plain_to_the_last_token": min(rate.to_the_last for rate in chosen),
        "slowest_session_over_plain": min(rate.slowest for rate in chosen),
        "share_within_10_percent_of_best": near,
        "least_over_best": min(against_best),
        "median_over_best": statistics.median(against_best),
        "worlds": len(chosen),
    }
    report.bars = [
        Bar("never slower than plain by more than 2 %", least >= 0.98, f"{least:.3f}"),
        Bar("within 10 % of the best of the others in 9 worlds of 10", near >= 0.9, f"{near:.2f}"),
    ]
    return report


def run(settings: Settings) -> None:
    """Compare ways to wait for drafts on a virtual clock, across latencies."""
    report = simulate(settings)
    report.print()
    report.exit(enforce=settings.bar)
