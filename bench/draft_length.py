"""The chosen draft length against the best fixed one, on recorded drafts and a virtual clock.

Scheduler and policy are those of the verify worker. What drafts come to was recorded
(`bench/draft_traces.py`), what steps and drafts take is a formula; so a run says the same on
every machine.
"""

import heapq
import itertools
import random
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.draft_traces import MOST, RECORDED, Trace, load_traces, record, save_traces
from bench.report import Bar, Report, progress
from outrider.cli.models import resolve_model
from outrider.config import CACHE, setting
from outrider.draft_length import format_draft_length
from outrider.messages import (
    CommitDraft,
    Draft,
    DraftWorkerRef,
    Endings,
    Progress,
    Proposal,
    SamplingParams,
    SessionEnded,
    SpeculationOptions,
    StartSession,
)
from outrider.model.blocks import BLOCK_TOKENS, BlockPool
from outrider.sampling.acceptance import verify_chain
from verify_worker.calibration import REPEATS, STEPS
from verify_worker.cost import NOTHING, CostModel, StepShape
from verify_worker.scheduler import Limits, Scheduler
from verify_worker.state import Decided, Outcome, Output, Plan, ToCoordinator, ToDrafter

DRAFTER = DraftWorkerRef("d", "127.0.0.1:1")
PROMPT_LEN = 32
VOCABULARY = 1000
# Never said by any completion.
WRONG = 0
FOREVER_S = 1e9


@dataclass(frozen=True, slots=True)
class Machine:
    """What a step takes: seconds at some numbers of rows, straight lines between and beyond."""

    name: str
    rows: tuple[int, ...]
    step_s: tuple[float, ...]

    def seconds(self, shape: StepShape) -> float:
        """What a step of so many rows takes."""
        low = min(max(bisect_right(self.rows, shape.rows) - 1, 0), len(self.rows) - 2)
        first, second = self.rows[low : low + 2]
        share = (shape.rows - first) / (second - first)
        return self.step_s[low] + share * (self.step_s[low + 1] - self.step_s[low])


MACHINES = (
    # SmolLM2-135M on two cores, as docs/performance.md has it.
    Machine(
        "cpu",
        (1, 2, 4, 8, 16, 32, 64),
        (0.0206, 0.0230, 0.0249, 0.0271, 0.0351, 0.0512, 0.0832),
    ),
    # Bound by memory up to 128 rows, then by arithmetic.
    Machine("flat", (1, 128, 256), (0.02, 0.022, 0.044)),
    # Where a row costs a quarter of a step.
    Machine("dear", (1, 2), (0.02, 0.025)),
)
# What a proposal takes: seconds on its way, and for each of its tokens.
LOOKUP_S = (0.0005, 0.0)
MODEL_S = (0.001, 0.0012)
SLOW_MODEL_S = (0.001, 0.006)


@dataclass(frozen=True, slots=True)
class Settings:
    """What to simulate."""

    traces: str = setting(str(RECORDED), env=False, help="Recorded drafts.")
    record: bool = setting(
        False, env=False, help="Record them anew with the model, to --traces, and simulate nothing."
    )
    model: str = setting("smollm2-135m-instruct", help="The target to record with.")
    noise: tuple[float, ...] = setting(
        (0.05, 0.1, 0.2), many=True, env=False, help="Noise of the weaker copies to record with."
    )
    new_tokens: int = setting(160, at_least=16, help="Tokens of a recorded completion.")
    sessions: tuple[int, ...] = setting((1, 8), many=True, help="Sessions at once.")
    lengths: tuple[int, ...] = setting(
        (1, 2, 3, 4, 6, 8, 16), many=True, env=False, help="Fixed draft lengths to compare with."
    )
    jitter: float = setting(0.03, at_least=0, help="Deviation of the logarithm of a step's time.")
    seed: int = setting(7, env=False, help="Of the jitter.")
    cache: str = setting(CACHE, help="Directory for the embedded model and its copies.")
    bar: bool = setting(False, help="Exit with 1 when a bar is missed.")


@dataclass(frozen=True, slots=True)
class World:
    """A machine, a drafter, and the completions that are asked for, one after the other."""

    drafter: str
    machine: Machine
    sessions: int
    proposal_s: tuple[float, float]
    traces: tuple[Trace, ...]
    jitter: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Rates:
    """What came of a world: tokens per second of all, and of each completion by itself."""

    total: float
    of_each: tuple[float, ...]
    mean_drafted: float


def calibrated(machine: Machine) -> CostModel:
    """What a verify worker knows of its steps when it starts."""
    cost = CostModel()
    for rows, sessions, context in STEPS:
        for _ in range(REPEATS):
            parts = [StepShape.of(rows, context + rows)] * sessions
            shape = sum(parts, NOTHING)
            cost.observe(shape, machine.seconds(shape))
    return cost


@dataclass(slots=True)
class Simulation:
    """One way to choose draft lengths in one world: `fixed` tokens, 0 for auto, None for off."""

    world: World
    fixed: int | None
    now_s: float = 0.0
    scheduler: Scheduler = field(init=False)
    # What the draft worker was asked, when it has its hands free, and what is on its way back.
    _wanted: list[CommitDraft] = field(default_factory=list)
    _asked_at_s: float = 0.0
    _free_at_s: float = 0.0
    _arrivals: list[tuple[float, int, Proposal]] = field(default_factory=list)
    _waiting: list[tuple[int, Trace]] = field(init=False)
    _running: dict[str, tuple[int, Trace, float]] = field(default_factory=dict)
    _rates: dict[int, float] = field(default_factory=dict)
    _asked: list[int] = field(default_factory=list)
    _random: random.Random = field(init=False)
    _order: "itertools.count[int]" = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        longest = max(len(trace.tokens) for trace in self.world.traces)
        limits = Limits(context_len=4096, vocab_size=VOCABULARY, draft_len=self.fixed or 0)
        blocks = self.world.sessions * (3 + (PROMPT_LEN + longest + MOST) // BLOCK_TOKENS)
        self.scheduler = Scheduler(BlockPool(blocks), limits, calibrated(self.world.machine))
        self._waiting = list(enumerate(self.world.traces))[::-1]
        self._random = random.Random(self.world.seed)

    def run(self) -> Rates:
        """Every completion, as many at once as there are sessions."""
        for _ in range(self.world.sessions):
            self._start_next()
        while self.scheduler.sessions:
            self._turn()
        tokens = sum(len(trace.tokens) for trace in self.world.traces)
        of_each = tuple(self._rates[number] for number in sorted(self._rates))
        mean = statistics.fmean(self._asked) if self._asked else 0.0
        return Rates(tokens / self.now_s, of_each, mean)

    def _start_next(self) -> None:
        if not self._waiting:
            return
        number, trace = self._waiting.pop()
        session_id = f"{number}"
        self._running[session_id] = (number, trace, self.now_s)
        command = StartSession(
            session_id=session_id,
            epoch=1,
            token_ids=tuple(1 + (number + at) % (VOCABULARY - 1) for at in range(PROMPT_LEN)),
            prompt_len=PROMPT_LEN,
            sampling=SamplingParams(),
            endings=Endings(len(trace.tokens)),
            speculation=SpeculationOptions(enabled=self.fixed is not None),
            drafter=DRAFTER,
        )
        self._take(self.scheduler.start(command, owner=0))

    def _turn(self) -> None:
        """What has come, then a step; when there is none, on to what comes next."""
        if self._wanted and self._free_at_s <= self.now_s:
            self._draft(max(self._free_at_s, self._asked_at_s))
        while self._arrivals and self._arrivals[0][0] <= self.now_s:
            came_at_s, _, proposal = heapq.heappop(self._arrivals)
            self._take(self.scheduler.drafts.receive(DRAFTER.worker_id, proposal, came_at_s))
        plan = self.scheduler.plan(self.now_s)
        if plan is None:
            wake_s = self.scheduler.wake_at_s(self.now_s)
            arrives_s = self._arrivals[0][0] if self._arrivals else FOREVER_S
            drafts_s = self._free_at_s if self._wanted else FOREVER_S
            self.now_s = min(arrives_s, drafts_s, FOREVER_S if wake_s is None else wake_s)
            return
        self.scheduler.reserve(plan)
        outcome = self._step(plan)
        self.now_s += outcome.compute_s
        self._take(self.scheduler.apply(plan, outcome, self.now_s))

    def _step(self, plan: Plan) -> Outcome:
        seconds = self.world.machine.seconds(plan.shape)
        seconds *= self._random.lognormvariate(0, self.world.jitter)
        results = []
        for work in plan.work:
            place = len(work.session.tokens) - PROMPT_LEN
            draft = work.draft.token_ids
            said = [_token(place + at) for at in range(len(draft) + 1)]
            results.append(Decided(verify_chain(draft, said)) if work.decides else None)
        return Outcome(tuple(results), seconds)

    def _take(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            match output:
                case ToDrafter(command=CommitDraft(draft_len=asked) as command) if asked:
                    self._wanted.append(command)
                    self._asked_at_s = self.now_s
                case ToCoordinator(event=SessionEnded(session_id=session_id)):
                    number, trace, began_s = self._running.pop(session_id)
                    self._rates[number] = len(trace.tokens) / (self.now_s - began_s)
                    self._start_next()
                case ToCoordinator(event=Progress(draft_tokens=drafted)):
                    self._asked.append(drafted)

    def _draft(self, begin_s: float) -> None:
        """The draft worker drafts for all that ask; the longest draft is what they wait for."""
        wanted, self._wanted = self._wanted, []
        latency_s, token_s = self.world.proposal_s
        proposals = [self._proposal(command) for command in wanted]
        came = [proposal for proposal in proposals if proposal is not None]
        work_s = token_s * max((len(p.draft.token_ids) for p in came), default=0)
        self._free_at_s = begin_s + work_s
        for proposal in came:
            said = replace(proposal, draft_us=int(1e6 * work_s))
            heapq.heappush(self._arrivals, (self._free_at_s + latency_s, next(self._order), said))

    def _proposal(self, command: CommitDraft) -> Proposal | None:
        """What would have been proposed there; None where the session has gone on or ended."""
        session = self.scheduler.sessions.get(command.session_id)
        base_len = command.base_len + len(command.token_ids)
        if session is None or len(session.tokens) != base_len:
            return None
        place = base_len - PROMPT_LEN
        tokens, accepted = self._running[command.session_id][1].draft(place, command.draft_len)
        draft = [_token(place + at) if at < accepted else WRONG for at in range(tokens)]
        return Proposal(
            session_id=command.session_id,
            epoch=command.epoch,
            base_len=base_len,
            draft=Draft(tuple(draft)),
        )


def _token(place: int) -> int:
    """What the target says there."""
    return 1 + place % (VOCABULARY - 1)


def worlds(settings: Settings) -> list[World]:
    """Every drafter that was recorded, two that were not, on every machine."""
    recorded = load_traces(Path(settings.traces))
    groups = {name: [t for t in recorded if t.drafter == name] for name in _names(recorded)}
    costs = {name: LOOKUP_S if name == "ngram" else MODEL_S for name in groups}
    first = next(name for name in groups if name != "ngram")
    groups["never right"] = [replace(t, accepted=(0,) * len(t.accepted)) for t in groups[first]]
    groups["right in turns"] = [_in_turns(trace) for trace in groups[first]]
    groups[f"{first}, slow"] = groups[first]
    costs |= {"never right": MODEL_S, "right in turns": MODEL_S, f"{first}, slow": SLOW_MODEL_S}
    return [
        World(
            name,
            machine,
            sessions,
            costs[name],
            tuple(traces) * (1 + (sessions > len(traces) // 2)),
            settings.jitter,
            settings.seed,
        )
        for machine in MACHINES
        for sessions in settings.sessions
        for name, traces in groups.items()
    ]


def _names(traces: Sequence[Trace]) -> list[str]:
    return list(dict.fromkeys(trace.drafter for trace in traces))


def _in_turns(trace: Trace) -> Trace:
    """A drafter that is right for 48 tokens, then wrong for 48, and so on."""
    accepted = [0 if place // 48 % 2 else right for place, right in enumerate(trace.accepted)]
    return replace(trace, accepted=tuple(accepted))


def simulate(settings: Settings) -> Report:
    """Every way in every world."""
    report = Report(
        "Tokens per second over plain decoding",
        [
            *("machine", "sessions", "drafter", *(f"k={k}" for k in settings.lengths)),
            *("auto", "mean k", "over the best", "slowest session"),
        ],
    )
    regrets: list[float] = []
    over_plain: list[float] = []
    slowest: list[float] = []
    for world in worlds(settings):
        plain = Simulation(world, None).run()
        fixed = [Simulation(world, k).run().total / plain.total for k in settings.lengths]
        auto = Simulation(world, 0).run()
        ratio = auto.total / plain.total
        regrets.append(1 - ratio / max(*fixed, 1.0))
        over_plain.append(ratio)
        slowest.append(min(a / b for a, b in zip(auto.of_each, plain.of_each, strict=True)))
        report.rows.append(
            [
                *(world.machine.name, world.sessions, world.drafter, *fixed),
                *(ratio, auto.mean_drafted, 1 - regrets[-1], slowest[-1]),
            ]
        )
        progress(f"{len(report.rows)} worlds")
    report.figures = {
        "worlds": len(regrets),
        "worst_regret": max(regrets),
        "mean_regret": statistics.fmean(regrets),
        "least_over_plain": min(over_plain),
        "slowest_session_over_plain": min(slowest),
        "lengths": [format_draft_length(k) for k in settings.lengths],
    }
    report.bars = [
        Bar("regret at most 3 % in every world", max(regrets) <= 0.03, f"{max(regrets):.3f}"),
        Bar("at least 0.97 of plain", min(over_plain) >= 0.97, f"{min(over_plain):.3f}"),
    ]
    return report


def run(settings: Settings) -> None:
    """Compare the chosen draft length with fixed ones, on recorded drafts."""
    if settings.record:
        model = resolve_model(settings.model, settings.cache)
        traces = record(model, Path(settings.cache), settings.noise, settings.new_tokens)
        save_traces(traces, Path(settings.traces))
        return
    report = simulate(settings)
    report.print()
    report.exit(enforce=settings.bar)
