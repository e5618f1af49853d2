"""One plain greedy session: Outrider's engine, transformers and vLLM on the same weights."""

from contextlib import ExitStack
from dataclasses import asdict, dataclass

import torch

from bench import peers
from bench.breakdown import break_down
from bench.engine import VerifyEngine
from bench.limits import MEMORY_BYTES, read_bandwidth, weight_bytes
from bench.peers import VLLM, vllm_settings
from bench.prompts import prompts_of
from bench.report import Report, progress
from bench.rounds import Spread, digits
from bench.sides import Side, Transformers
from bench.throughput import Throughput, measure, report_of
from outrider.cli.models import resolve_model
from outrider.config import CACHE, setting
from outrider.model.embedded import EMBEDDED_MODEL
from outrider.model.tokenizers import load_tokenizer

# The least ratio of tokens per second, by side.
LEAST = {"transformers": 1.25, VLLM.name: 1.25}
_PROFILED_STEPS = 16


@dataclass(frozen=True, slots=True)
class Settings:
    """What to run, and against whom."""

    model: str = setting(EMBEDDED_MODEL, help="A path, or this name.")
    rounds: int = setting(7, at_least=1, help="Rounds; each side has its turn in each.")
    new_tokens: int = setting(64, at_least=2, help="Tokens to generate.")
    prompt_tokens: int = setting(32, at_least=1, help="Tokens of the prompt.")
    threads: int = setting(2, at_least=1, help="Threads of each side.")
    without: tuple[str, ...] = setting(
        (), many=True, choices=tuple(LEAST), help="Leave a side out; its bar is not met then."
    )
    vllm_eager: bool = setting(False, help="Keep vLLM from compiling the model.")
    cache: str = setting(CACHE, help="Directory for the embedded model and the peers.")
    bar: bool = setting(False, help="Exit with 1 when a bar is not met.")


def limit(path: str, engine: VerifyEngine, ours: Throughput) -> Report:
    """How far from the speed of memory a step is, and what fills it."""
    weights = weight_bytes(path)
    memory = read_bandwidth(MEMORY_BYTES)
    again = read_bandwidth(weights)
    step_s = Spread.of(ours.step_s).median
    prompt = [1] * 32
    (session,) = engine.decoding([prompt], 2 * _PROFILED_STEPS + 8)
    parts = break_down(engine.step, _PROFILED_STEPS)
    engine.close(session)
    limit_s = weights / memory.median
    report = Report("How far from the speed of memory", ["what", "value"])
    report.rows += [
        ["weights, MB", digits(weights / 1e6)],
        ["memory is read at, GB/s", memory.times(1e-9)],
        ["a buffer of the weights' size is read at, GB/s", again.times(1e-9)],
        ["so a step can't be below, ms", digits(limit_s * 1e3)],
        ["and is, ms", digits(step_s * 1e3)],
        ["of the limit, reached", f"{limit_s / step_s:.0%}"],
        *(
            [f"{kind}, ms of a step", f"{seconds * 1e3:.2f} ({seconds / parts.step_s:.0%})"]
            for kind, seconds in parts.seconds.items()
        ),
    ]
    report.figures = {
        "weight_bytes": weights,
        "read_bytes_per_s": asdict(memory),
        "reread_bytes_per_s": asdict(again),
        "limit_s": limit_s,
        "reached": limit_s / step_s,
        "profiled_step_s": parts.step_s,
        "parts_s": parts.seconds,
    }
    return report


def run(settings: Settings) -> None:
    """One plain greedy session against transformers and vLLM, and against the memory's speed."""
    path = resolve_model(settings.model, settings.cache)
    tokenizer = load_tokenizer(path)
    with ExitStack() as stack:
        sides: list[Side] = []
        if VLLM.name not in settings.without:
            # First: it wants the machine for itself while it loads and compiles.
            started = peers.start(
                VLLM,
                settings.cache,
                **vllm_settings(path, settings.threads, eager=settings.vllm_eager),
            )
            sides.append(stack.enter_context(started))
        engine = VerifyEngine(path, threads=settings.threads)
        sides.insert(0, engine)
        if "transformers" not in settings.without:
            sides.insert(1, Transformers(path))
        progress(f"{len(sides)} sides, {torch.get_num_threads()} threads")
        results = measure(
            sides,
            lambda number: prompts_of(tokenizer, 1, settings.prompt_tokens, first=number),
            new_tokens=settings.new_tokens,
            rounds=settings.rounds,
        )
    report = report_of("One session, plain, float32", results, engine.name, LEAST)
    memory = limit(path, engine, results[engine.name])
    memory.show()
    report.figures["limit"] = memory.figures
    report.print()
    report.exit(enforce=settings.bar)
