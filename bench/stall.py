"""How long a running session waits for its next token while a long prompt comes in."""

import time
from dataclasses import asdict, dataclass
from typing import Any

from bench.engine import VerifyEngine
from bench.prompts import prompts_of
from bench.report import Report, progress
from bench.rounds import Spread, alternate, ratios
from outrider.cli.models import resolve_model
from outrider.config import CACHE, setting
from outrider.model.embedded import EMBEDDED_MODEL
from outrider.model.tokenizers import load_tokenizer

CHUNKED, UNCHUNKED = "in chunks", "in one step"
_RUNNING_PROMPT = 64


@dataclass(frozen=True, slots=True)
class Settings:
    """What to run."""

    model: str = setting(EMBEDDED_MODEL, help="A path, or this name.")
    prompt_tokens: int = setting(2000, at_least=16, help="Tokens of the prompt that comes in.")
    alone_tokens: int = setting(24, at_least=1, help="Tokens of the running session before that.")
    rounds: int = setting(5, at_least=1, help="Rounds; both ways have their turn in each.")
    threads: int = setting(2, at_least=1, help="Threads of torch.")
    cache: str = setting(CACHE, help="Directory for the embedded model.")
    bar: bool = setting(False, help="There is no bar for this one.")


@dataclass(frozen=True, slots=True)
class Stall:
    """Seconds: the running session's longest gap alone and beside the prompt; the prompt's wait."""

    alone_s: float
    beside_s: float
    first_token_s: float


def stalled(engine: VerifyEngine, running: list[int], coming: list[int], alone: int) -> Stall:
    """One session runs alone for a while, then beside a prompt until that says a token."""
    (session,) = engine.decoding([running], alone + len(coming) + 2)
    last = time.perf_counter()
    gaps: list[float] = []

    def step() -> set[str]:
        """Take a step, note the gap if the running session said something: who did."""
        nonlocal last
        said = engine.step().tokens.keys()
        if session in said:
            now = time.perf_counter()
            gaps.append(now - last)
            last = now
        return set(said)

    for _ in range(alone):
        step()
    alone_s = max(gaps)
    gaps.clear()
    began = time.perf_counter()
    newcomer = engine.start(coming, 1)
    while newcomer not in step():
        pass
    first_token_s = time.perf_counter() - began
    engine.close(session)
    return Stall(alone_s, max(gaps), first_token_s)


def report_of(taken: dict[str, list[Stall]], prompt_tokens: int) -> Report:
    """Medians over the rounds."""
    report = Report(
        f"A prompt of {prompt_tokens} tokens beside a running session",
        ["the prompt", "gap alone, ms", "longest gap, ms", "over alone", "its first token, ms"],
    )
    for name, stalls in taken.items():
        alone, beside = [s.alone_s for s in stalls], [s.beside_s for s in stalls]
        spreads = {
            "alone_s": Spread.of(alone),
            "beside_s": Spread.of(beside),
            "over_alone": ratios(beside, alone),
            "first_token_s": Spread.of([s.first_token_s for s in stalls]),
        }
        report.rows.append(
            [
                name,
                spreads["alone_s"].times(1e3),
                spreads["beside_s"].times(1e3),
                spreads["over_alone"],
                spreads["first_token_s"].times(1e3),
            ]
        )
        report.figures[name] = {key: asdict(spread) for key, spread in spreads.items()}
    return report


def run(settings: Settings) -> None:
    """The longest gap between tokens of a running session while a long prompt comes in."""
    path = resolve_model(settings.model, settings.cache)
    tokenizer = load_tokenizer(path)
    engines = {
        CHUNKED: VerifyEngine(path, threads=settings.threads),
        UNCHUNKED: VerifyEngine(path, threads=settings.threads, **whole_prompts(settings)),
    }

    def turn(name: str, number: int) -> Stall:
        running, coming = (
            prompts_of(tokenizer, 1, tokens, first=2 * number + which)[0]
            for which, tokens in enumerate((_RUNNING_PROMPT, settings.prompt_tokens))
        )
        stall = stalled(engines[name], running, coming, settings.alone_tokens)
        progress(f"round {number + 1} of {settings.rounds}, {name}: {stall.beside_s:.3f} s")
        return stall

    turns = {
        CHUNKED: lambda number: turn(CHUNKED, number),
        UNCHUNKED: lambda number: turn(UNCHUNKED, number),
    }
    report = report_of(alternate(turns, settings.rounds), settings.prompt_tokens)
    report.print()
    report.exit(enforce=settings.bar)


def whole_prompts(settings: Settings) -> dict[str, Any]:
    """The settings of a worker that takes the prompt in one step."""
    return {"step_tokens": settings.prompt_tokens + 16, "prefill_slowdown": 1e9}
