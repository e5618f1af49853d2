"""A GGUF file as it is, one plain greedy session: Outrider's engine against llama.cpp."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench import peers
from bench.engine import VerifyEngine
from bench.peers import LLAMA_CPP
from bench.prompts import prompts_of
from bench.sides import Side
from bench.throughput import measure, report_of
from outrider.cli.models import resolve_model
from outrider.config import CACHE, setting
from outrider.errors import ConfigError
from outrider.model.describe import locate_checkpoint
from outrider.model.embedded import EMBEDDED_MODEL
from outrider.model.tokenizers import load_tokenizer

# The least ratio of tokens per second.
LEAST = {LLAMA_CPP.name: 0.7}
_CONTEXT = 1024


@dataclass(frozen=True, slots=True)
class Settings:
    """What to run."""

    model: str = setting(EMBEDDED_MODEL, help="A .gguf file, or this name.")
    rounds: int = setting(7, at_least=1, help="Rounds; each side has its turn in each.")
    new_tokens: int = setting(64, at_least=2, help="Tokens to generate.")
    prompt_tokens: int = setting(32, at_least=1, help="Tokens of the prompt.")
    threads: int = setting(2, at_least=1, help="Threads of each side.")
    without: tuple[str, ...] = setting(
        (), many=True, choices=tuple(LEAST), help="Leave a side out; its bar is not met then."
    )
    cache: str = setting(CACHE, help="Directory for the embedded model and the peers.")
    bar: bool = setting(False, help="Exit with 1 when a bar is not met.")


def gguf_file(settings: Settings) -> str:
    """The .gguf file to run.

    Raises:
        ConfigError: the model is none.
    """
    path = resolve_model(settings.model, settings.cache)
    # The file that the embedded model was converted from lies beside it.
    where = locate_checkpoint(f"{path}-gguf" if settings.model == EMBEDDED_MODEL else path)
    if where.suffix != ".gguf":
        raise ConfigError(f"{settings.model} is no .gguf file")
    return str(where)


def run(settings: Settings) -> None:
    """A GGUF file with its weights kept packed, one plain session, against llama.cpp."""
    path = gguf_file(settings)
    tokenizer = load_tokenizer(path)
    with ExitStack() as stack:
        sides: list[Side] = []
        if LLAMA_CPP.name not in settings.without:
            started = peers.start(
                LLAMA_CPP,
                settings.cache,
                model=path,
                threads=settings.threads,
                context_len=_CONTEXT,
            )
            sides.append(stack.enter_context(started))
        engine = VerifyEngine(path, threads=settings.threads)
        sides.insert(0, engine)
        results = measure(
            sides,
            lambda number: prompts_of(tokenizer, 1, settings.prompt_tokens, first=number),
            new_tokens=settings.new_tokens,
            rounds=settings.rounds,
        )
    report = report_of(f"{Path(path).name}, one session, plain", results, engine.name, LEAST)
    report.print()
    report.exit(enforce=settings.bar)
