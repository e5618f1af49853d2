"""Several plain greedy sessions at once: Outrider's engine against vLLM on the same weights."""

from contextlib import ExitStack
from dataclasses import dataclass

from bench import peers
from bench.engine import VerifyEngine
from bench.peers import VLLM, vllm_settings
from bench.prompts import prompts_of
from bench.sides import Side
from bench.throughput import measure, report_of
from outrider.cli.models import resolve_model
from outrider.config import CACHE, setting
from outrider.model.embedded import EMBEDDED_MODEL
from outrider.model.tokenizers import load_tokenizer

# The least ratio of total tokens per second.
LEAST = {VLLM.name: 1.3}


@dataclass(frozen=True, slots=True)
class Settings:
    """What to run."""

    model: str = setting(EMBEDDED_MODEL, help="A path, or this name.")
    sessions: int = setting(8, at_least=1, help="Sessions at once.")
    rounds: int = setting(5, at_least=1, help="Rounds; each side has its turn in each.")
    new_tokens: int = setting(64, at_least=2, help="Tokens to generate, of each.")
    prompt_tokens: int = setting(32, at_least=1, help="Tokens of each prompt.")
    threads: int = setting(2, at_least=1, help="Threads of each side.")
    without: tuple[str, ...] = setting(
        (), many=True, choices=tuple(LEAST), help="Leave a side out; its bar is not met then."
    )
    vllm_eager: bool = setting(False, help="Keep vLLM from compiling the model.")
    cache: str = setting(CACHE, help="Directory for the embedded model and the peers.")
    bar: bool = setting(False, help="Exit with 1 when a bar is not met.")


def run(settings: Settings) -> None:
    """Total tokens per second of eight plain sessions, against vLLM."""
    path = resolve_model(settings.model, settings.cache)
    tokenizer = load_tokenizer(path)
    sessions = settings.sessions
    with ExitStack() as stack:
        sides: list[Side] = []
        if VLLM.name not in settings.without:
            options = vllm_settings(
                path, settings.threads, sessions=sessions, eager=settings.vllm_eager
            )
            sides.append(stack.enter_context(peers.start(VLLM, settings.cache, **options)))
        engine = VerifyEngine(path, threads=settings.threads)
        sides.insert(0, engine)
        results = measure(
            sides,
            lambda number: prompts_of(
                tokenizer, sessions, settings.prompt_tokens, first=number * sessions
            ),
            new_tokens=settings.new_tokens,
            rounds=settings.rounds,
        )
    report = report_of(f"{sessions} sessions, plain, float32", results, engine.name, LEAST)
    report.print()
    report.exit(enforce=settings.bar)
