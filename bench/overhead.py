"""What a step takes outside the model's forward, for 1, 8 and 32 plain sessions."""

import asyncio
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from bench.breakdown import break_down, functions
from bench.engine import PHASES, Step, VerifyEngine
from bench.prompts import prompts_of
from bench.report import Bar, Report, progress
from bench.rounds import Spread, alternate, digits, ratios
from outrider.cli.models import resolve_model
from outrider.client import AsyncClient
from outrider.config import CACHE, setting
from outrider.local.commands import StackSettings
from outrider.local.stack import LocalStack
from outrider.model.embedded import EMBEDDED_MODEL
from outrider.model.tokenizers import Tokenizer, load_tokenizer

SESSIONS = (1, 8, 32)
# The share of a step outside the forward stays below this.
BAR_SESSIONS, MOST_SHARE = 8, 0.05
IN_PROCESS, SERVICES = "engine alone", "through the services"


@dataclass(frozen=True, slots=True)
class Settings:
    """What to run."""

    model: str = setting(EMBEDDED_MODEL, help="A path, or this name.")
    sessions: tuple[int, ...] = setting(SESSIONS, many=True, at_least=1, help="Sessions at once.")
    steps: int = setting(24, at_least=1, help="Steps of each round.")
    rounds: int = setting(5, at_least=1, help="Rounds; each number of sessions has its turn.")
    prompt_tokens: int = setting(32, at_least=1, help="Tokens of each prompt.")
    threads: int = setting(2, at_least=1, help="Threads of torch.")
    services: bool = setting(True, help="Compare with the same sessions through the services.")
    profile: bool = setting(False, help="Print the functions and operators that take the most.")
    cache: str = setting(CACHE, help="Directory for the embedded model.")
    bar: bool = setting(False, help="Exit with 1 when the bar is not met.")


class Sessions:
    """Plain sessions of an engine, begun and timed again and again."""

    def __init__(self, engine: VerifyEngine, tokenizer: Tokenizer, settings: Settings) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._settings = settings
        self._begun = 0

    def prompts(self, sessions: int) -> list[list[int]]:
        """As many prompts, other ones each time."""
        self._begun += sessions
        return prompts_of(
            self._tokenizer, sessions, self._settings.prompt_tokens, first=self._begun
        )

    def steps(self, sessions: int) -> list[Step]:
        """The steps of one round, every session decoding in each of them."""
        steps = self._settings.steps
        # The first to be prefilled has said some tokens when the last one is.
        names = self._engine.decoding(self.prompts(sessions), 2 * steps + sessions + 8)
        taken = [self._engine.step() for _ in range(steps)]
        for name in names:
            self._engine.close(name)
        return taken

    def profiled(self, sessions: int) -> str:
        """Operators and Python functions of these steps, as text."""
        steps = self._settings.steps
        names = self._engine.decoding(self.prompts(sessions), 4 * steps + sessions + 8)
        parts = break_down(self._engine.step, steps)
        called = functions(self._engine.step, steps)
        for name in names:
            self._engine.close(name)
        lines = [f"{sessions} sessions, a step of {parts.step_s * 1e3:.2f} ms:"]
        lines += [f"  {kind}: {s * 1e3:.2f} ms" for kind, s in parts.seconds.items()]
        lines += [
            f"  {operator.seconds * 1e3:8.3f} ms  {operator.calls:6.1f} calls  {operator.name}"
            for operator in parts.operators[:15]
        ]
        return "\n".join([*lines, called])


def add_steps(report: Report, phases: Report, sessions: int, rounds: list[list[Step]]) -> Spread:
    """The lines of one number of sessions; returns the share outside the forward."""
    share = Spread.of([Spread.of([step.outside for step in steps]).median for steps in rounds])
    step_s = Spread.of([Spread.of([step.seconds for step in steps]).median for steps in rounds])
    every = [step for steps in rounds for step in steps]
    of_phase = {phase: Spread.of([step.phases[phase] for step in every]) for phase in PHASES}
    phases.rows.append([sessions, *(digits(of_phase[phase].median * 1e3) for phase in PHASES)])
    report.rows.append(
        [
            sessions,
            step_s.times(1e3),
            f"{share.median:.1%} ({share.low:.1%} to {share.high:.1%})",
        ]
    )
    report.figures[str(sessions)] = {
        "step_s": asdict(step_s),
        "outside_share": asdict(share),
        "phases_s": {phase: asdict(spread) for phase, spread in of_phase.items()},
    }
    return share


class Services:
    """The same sessions through coordinator, gRPC and a verify worker; a context manager."""

    def __init__(self, path: str, threads: int) -> None:
        settings = StackSettings(
            model=path, drafter="none", threads=threads, log_level="warning", draft_workers=0
        )
        self._stack = LocalStack(settings, report=progress)
        self._runner = asyncio.Runner()
        self._client: AsyncClient | None = None

    def __enter__(self) -> "Services":
        self._runner.__enter__()
        self._runner.run(self._stack.start())
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._stack.stop())
        self._runner.__exit__(None, None, None)

    def tokens_per_s(self, prompts: list[list[int]], new_tokens: int) -> float:
        """All prompts at once."""
        return self._runner.run(self._tokens_per_s(prompts, new_tokens))

    async def _tokens_per_s(self, prompts: list[list[int]], new_tokens: int) -> float:
        async with AsyncClient(self._stack.address) as client:
            began = time.perf_counter()
            completions = await asyncio.gather(
                *(
                    client.complete(
                        token_ids=ids, max_tokens=new_tokens, temperature=0.0, speculation=False
                    )
                    for ids in prompts
                )
            )
            seconds = time.perf_counter() - began
        return sum(len(completion.token_ids) for completion in completions) / seconds


def add_services(
    report: Report, sessions: Sessions, engine: VerifyEngine, path: str, settings: Settings
) -> None:
    """Tokens per second of whole sessions, in process and through the services, in turns."""
    new_tokens = settings.steps

    def alone(_: int) -> float:
        completed = engine.complete(sessions.prompts(BAR_SESSIONS), new_tokens)
        return BAR_SESSIONS * new_tokens / completed.seconds

    with ExitStack() as stack:
        services = stack.enter_context(Services(path, settings.threads))
        rates = alternate(
            {
                IN_PROCESS: alone,
                SERVICES: lambda _: services.tokens_per_s(
                    sessions.prompts(BAR_SESSIONS), new_tokens
                ),
            },
            settings.rounds,
        )
    over = ratios(rates[SERVICES], rates[IN_PROCESS])
    for name, values in rates.items():
        report.rows.append([f"{BAR_SESSIONS} {name}", f"{Spread.of(values)} tokens/s"])
        report.figures[name] = {"tokens_per_s": asdict(Spread.of(values))}
    report.rows.append([f"{SERVICES} over {IN_PROCESS}", over])
    report.figures["services_over_alone"] = asdict(over)


def run(settings: Settings) -> None:
    """What a step takes outside the model, for 1, 8 and 32 sessions, and through the services."""
    path = resolve_model(settings.model, settings.cache)
    engine = VerifyEngine(path, threads=settings.threads)
    sessions = Sessions(engine, load_tokenizer(path), settings)
    progress("loaded")
    turns = {str(n): (lambda _, n=n: sessions.steps(n)) for n in settings.sessions}
    taken = alternate(turns, settings.rounds)
    report = Report(
        "What a step takes outside the model", ["sessions", "step, ms", "outside the forward"]
    )
    phases = Report("Milliseconds of a step, medians", ["sessions", *PHASES])
    shares = {n: add_steps(report, phases, n, taken[str(n)]) for n in settings.sessions}
    title = f"below {MOST_SHARE:.0%} of the step at {BAR_SESSIONS} sessions"
    share = shares.get(BAR_SESSIONS)
    if share is None:
        report.bars = [Bar(title, False, "not measured")]
    else:
        report.bars = [Bar(title, share.median < MOST_SHARE, f"{share.median:.1%}")]
    if settings.services:
        add_services(report, sessions, engine, path, settings)
    if settings.profile:
        for n in settings.sessions:
            print(sessions.profiled(n))
    phases.show()
    report.print()
    report.exit(enforce=settings.bar)
