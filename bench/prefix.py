"""Time to the first token of a prompt that another session had before."""

import time
from dataclasses import asdict, dataclass

from bench.engine import VerifyEngine
from bench.prompts import prompts_of
from bench.report import Bar, Report, progress
from bench.rounds import Spread, ratios
from outrider.cli.models import resolve_model
from outrider.config import CACHE, setting
from outrider.model.embedded import EMBEDDED_MODEL
from outrider.model.tokenizers import load_tokenizer

# The second session's time to its first token over the first's.
MOST_RATIO = 0.15


@dataclass(frozen=True, slots=True)
class Settings:
    """What to run."""

    model: str = setting(EMBEDDED_MODEL, help="A path, or this name.")
    prompt_tokens: int = setting(1000, at_least=1, help="Tokens of the prompt.")
    new_tokens: int = setting(8, at_least=1, help="Tokens that each session says.")
    rounds: int = setting(7, at_least=1, help="Rounds; each has a prompt of its own.")
    threads: int = setting(2, at_least=1, help="Threads of torch.")
    cache: str = setting(CACHE, help="Directory for the embedded model.")
    bar: bool = setting(False, help="Exit with 1 when the bar is not met.")


def first_token_s(
    engine: VerifyEngine, prompt: list[int], new_tokens: int
) -> tuple[float, list[int]]:
    """Seconds to the first token of a session, and what it says until its end."""
    began = time.perf_counter()
    session = engine.start(prompt, new_tokens)
    said: list[int] = []
    first_s = 0.0
    while len(said) < new_tokens:
        said += engine.step().tokens.get(session, ())
        first_s = first_s or (time.perf_counter() - began if said else 0.0)
    return first_s, said


def measure(engine: VerifyEngine, prompts: list[list[int]], new_tokens: int) -> Report:
    """Two sessions of each prompt, one after the other; the first prompt only warms up."""
    seconds: tuple[list[float], list[float]] = ([], [])
    same = 0
    for number, prompt in enumerate(prompts):
        first, second = (first_token_s(engine, prompt, new_tokens) for _ in range(2))
        progress(f"round {number} of {len(prompts) - 1}: {first[0]:.3f} s, then {second[0]:.3f} s")
        if number:
            seconds[0].append(first[0])
            seconds[1].append(second[0])
            same += first[1] == second[1]
    over = ratios(seconds[1], seconds[0])
    rounds = len(prompts) - 1
    report = Report(
        f"One prompt of {len(prompts[0])} tokens, twice", ["session", "to the first token, ms"]
    )
    report.rows = [
        ["first", Spread.of(seconds[0]).times(1e3)],
        ["second", Spread.of(seconds[1]).times(1e3)],
        ["second over first", over],
        ["same text", f"{same} of {rounds}"],
    ]
    report.figures = {
        "first_s": asdict(Spread.of(seconds[0])),
        "second_s": asdict(Spread.of(seconds[1])),
        "second_over_first": asdict(over),
        "same_texts": same,
        "rounds": rounds,
    }
    title = f"the second takes at most {MOST_RATIO}x the first to its first token"
    report.bars = [Bar(title, over.median <= MOST_RATIO, f"{over}x")]
    return report


def run(settings: Settings) -> None:
    """Time to the first token of a second session with the prompt of the first."""
    path = resolve_model(settings.model, settings.cache)
    engine = VerifyEngine(path, threads=settings.threads)
    prompts = prompts_of(load_tokenizer(path), settings.rounds + 1, settings.prompt_tokens)
    report = measure(engine, prompts, settings.new_tokens)
    report.print()
    report.exit(enforce=settings.bar)
