"""Seconds of one forward by its rows: a verification of k drafts has k + 1 of them."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

from bench.engine import VerifyEngine
from bench.prompts import prompts_of
from bench.report import Bar, Report, progress
from bench.rounds import Spread, alternate, ratios
from bench.sides import Transformers
from outrider.cli.models import resolve_model
from outrider.config import CACHE, setting
from outrider.messages import Draft
from outrider.model.embedded import EMBEDDED_MODEL
from outrider.model.tokenizers import load_tokenizer

ROWS = (1, 2, 4, 8, 16, 32, 64)
# A verification of so many rows costs at most so many times one row.
BAR_ROWS, MOST_RATIO = 8, 1.35


@dataclass(frozen=True, slots=True)
class Settings:
    """What to time."""

    model: str = setting(EMBEDDED_MODEL, help="A path, or this name.")
    rows: tuple[int, ...] = setting(ROWS, many=True, at_least=1, help="Rows of a forward.")
    context: int = setting(256, at_least=1, help="Tokens before them.")
    rounds: int = setting(15, at_least=1, help="Rounds; every forward has its turn in each.")
    threads: int = setting(2, at_least=1, help="Threads of torch.")
    transformers: bool = setting(True, help="Time plain transformers too.")
    cache: str = setting(CACHE, help="Directory for the embedded model.")
    bar: bool = setting(False, help="Exit with 1 when the bar is not met.")


def forwards(
    engine: VerifyEngine, context: list[int], rows: tuple[int, ...]
) -> dict[int, Callable[[], float]]:
    """Verifications by their number of rows, of one session with that context."""
    (session,) = engine.decoding([context], 2)
    return {
        n: engine.verification(
            session, Draft(tuple(context[i % len(context)] for i in range(n - 1)))
        )
        for n in rows
    }


def measure(
    sides: dict[str, dict[int, Callable[[], float]]], rounds: int
) -> dict[str, dict[int, list[float]]]:
    """Seconds of each side by rows: in a round everything runs once, after one to warm up."""
    turns = {
        f"{name} {n}": (lambda _, seconds=seconds: seconds())
        for name, by_rows in sides.items()
        for n, seconds in by_rows.items()
    }
    taken = alternate(turns, rounds, warm=2)
    return {name: {n: taken[f"{name} {n}"] for n in by_rows} for name, by_rows in sides.items()}


def report_of(taken: dict[str, dict[int, list[float]]], context: int) -> Report:
    """The curve of each side, over its own forward of the fewest rows."""
    report = Report(
        f"Rows of one forward, context {context}", ["side", "rows", "ms", "over the first"]
    )
    for name, by_rows in taken.items():
        first = next(iter(by_rows.values()))
        for n, seconds in by_rows.items():
            spread, over = Spread.of(seconds), ratios(seconds, first)
            report.rows.append([name, n, spread.times(1e3), over])
            report.figures.setdefault(name, {})[n] = {
                "seconds": asdict(spread),
                "over_first": asdict(over),
            }
    ours = taken[VerifyEngine.name]
    title = f"{BAR_ROWS} rows cost at most {MOST_RATIO}x one row"
    if BAR_ROWS in ours and 1 in ours:
        over = ratios(ours[BAR_ROWS], ours[1])
        report.bars = [Bar(title, over.median <= MOST_RATIO, f"{over}x")]
    else:
        report.bars = [Bar(title, False, "not measured")]
    return report


def run(settings: Settings) -> None:
    """Seconds of one forward of 1 to 64 rows, of Outrider's engine and of transformers."""
    path = resolve_model(settings.model, settings.cache)
    (context,) = prompts_of(load_tokenizer(path), 1, settings.context)
    rows = tuple(sorted(set(settings.rows)))
    engine = VerifyEngine(path, threads=settings.threads)
    sides = {engine.name: forwards(engine, context, rows)}
    if settings.transformers:
        other = Transformers(path)
        sides[other.name] = {n: other.verification(context, n) for n in rows}
    progress("loaded; every forward takes its turn")
    report = report_of(measure(sides, settings.rounds), settings.context)
    report.print()
    report.exit(enforce=settings.bar)
