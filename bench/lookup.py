"""What a looked-up proposal costs in a long context, and how much of it the target accepts."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.answers import plain_greedy
from bench.prompts import encode, load_prompts
from bench.replay import replay, total
from bench.report import Bar, Report, progress
from bench.rounds import Spread
from outrider.cli.models import resolve_model
from outrider.config import CACHE, setting
from outrider.drafting.base import Drafter, DraftLaw, DraftRequest
from outrider.drafting.ngram import NgramDrafter
from outrider.drafting.suffix import INDEX_CHUNK, SuffixDrafter
from outrider.errors import ConfigError
from outrider.figures import SpeculationFigures
from outrider.messages import SamplingParams
from outrider.model.embedded import EMBEDDED_MODEL
from outrider.model.tokenizers import Tokenizer, load_tokenizer

DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": NgramDrafter,
    "suffix": lambda: SuffixDrafter(share_outputs=False),
    "suffix, earlier outputs": SuffixDrafter,
}
SHORT_CONTEXT = 2048
# What a proposal may cost with the tokens that were committed before it, and how much more it
# may in a long context than in a short one.
MOST_US, MOST_TIMES = 500.0, 2.0
COMMITTED = 3
_LAW = DraftLaw(corpus="lookup")


@dataclass(frozen=True, slots=True)
class Settings:
    """What to look up."""

    model: str = setting(EMBEDDED_MODEL, help="The target: a path, or this name.")
    context: int = setting(32768, at_least=64, help="Tokens of the session's text.")
    draft_len: int = setting(5, at_least=1, help="Draft length k.")
    rounds: int = setting(300, at_least=10, help="Proposals to time.")
    count: int = setting(0, at_least=0, help="Prompts whose answers are drafted too; 0 is none.")
    prompts: str | None = setting(None, help="File of JSON lines with category and turns.")
    prompt_tokens: int = setting(768, at_least=16, help="Longest prompt, in tokens.")
    new_tokens: int = setting(128, at_least=2, help="Tokens of an answer.")
    threads: int = setting(2, at_least=1, help="Threads of torch.")
    cache: str = setting(CACHE, help="Directory for the embedded model.")
    bar: bool = setting(False, help="Exit with 1 when a proposal costs too much.")


@dataclass(frozen=True, slots=True)
class Cost:
    """What following a text costs: seconds of work for each token that it was opened with, and
    for each round, which commits some tokens and proposes."""

    opened_s: float
    round_s: Spread


def run(settings: Settings) -> None:
    """The cost of a proposal at 32k tokens for ngram and suffix, and what is accepted of them."""
    path = resolve_model(settings.model, settings.cache)
    tokenizer = load_tokenizer(path)
    texts = {
        "text": document(tokenizer, settings.context),
        "one token": [7] * settings.context,
        "random": random_tokens(settings.context, tokenizer.vocab_size),
    }
    report = costs(texts, settings)
    if settings.count:
        accepted = acceptance(path, tokenizer, settings)
        accepted.show()
        report.figures |= {"accepted": accepted.figures}
    report.print()
    report.exit(enforce=settings.bar)


# --- what it costs --------------------------------------------------------------------------


def document(tokenizer: Tokenizer, tokens: int) -> list[int]:
    """The documents and sources of this project, as far as they are wanted."""
    root = Path(__file__).resolve().parent.parent
    files = [*sorted(root.glob("docs/*.md")), *sorted(root.glob("outrider/**/*.py"))]
    ids: list[int] = []
    for file in files:
        ids += tokenizer.encode(file.read_text())
        if len(ids) >= tokens:
            return ids[:tokens]
    raise ConfigError(f"the text of this project has {len(ids)} tokens; use a --context below")


def random_tokens(count: int, vocab_size: int) -> list[int]:
    """Tokens that are drawn at random, the same each time."""
    rng = random.Random(0)
    return [rng.randrange(vocab_size) for _ in range(count)]


def costs(texts: dict[str, list[int]], settings: Settings) -> Report:
    """One line a text, drafter and length of context."""
    report = Report(
        f"A proposal of up to {settings.draft_len} tokens, {COMMITTED} committed before each",
        ["text", "drafter", "context", "proposal, us", "opening, us a token"],
    )
    for text, tokens in texts.items():
        for name, make in DRAFTERS.items():
            medians: list[float] = []
            for context in sorted({min(SHORT_CONTEXT, settings.context), settings.context}):
                cost = follow(make(), tokens[:context], settings)
                shown = cost.round_s.times(1e6)
                medians.append(shown.median)
                report.rows.append([text, name, context, shown, cost.opened_s * 1e6])
                report.figures[f"{name}, {text}, {context}"] = {
                    "proposal_us": asdict(shown),
                    "opening_us_a_token": cost.opened_s * 1e6,
                }
            report.bars.append(_bar(f"{name}, {text}", medians[0], medians[-1], settings.context))
    return report


def follow(drafter: Drafter, tokens: Sequence[int], settings: Settings) -> Cost:
    """Open a session with the tokens, and go on as the text did somewhere before.

    A session that said all of them has been there, for drafters that look at earlier outputs.
    """
    drafter.open("before", tokens, SamplingParams(), _LAW)
    drafter.close("before")
    drafter.open("s", [1], SamplingParams(), _LAW)
    for _ in range(0, len(tokens), INDEX_CHUNK):
        _answer(drafter, 0)
    began = time.perf_counter()
    drafter.open("s", tokens, SamplingParams(), _LAW)
    _answer(drafter, 0)
    opened_s = (time.perf_counter() - began) / len(tokens)
    rng = random.Random(1)
    taken: list[float] = []
    held = len(tokens)
    for _ in range(settings.rounds):
        start = rng.randrange(len(tokens) - COMMITTED)
        committed = tokens[start : start + COMMITTED]
        began = time.perf_counter()
        drafter.commit("s", held, committed)
        _answer(drafter, settings.draft_len)
        taken.append(time.perf_counter() - began)
        held += COMMITTED
    return Cost(opened_s, Spread.of(taken))


def _answer(drafter: Drafter, draft_len: int) -> None:
    while drafter.propose([DraftRequest("s", draft_len)]) == [None]:
        pass


def _bar(what: str, short_us: float, long_us: float, context: int) -> Bar:
    met = long_us <= MOST_US and long_us <= MOST_TIMES * short_us
    times = f"{long_us / short_us:.2f} times that of a short one"
    return Bar(f"{what}: quick at {context} tokens", met, f"{long_us:.0f} us, {times}")


# --- what is accepted -----------------------------------------------------------------------


def acceptance(path: str, tokenizer: Tokenizer, settings: Settings) -> Report:
    """Mean acceptance length by category, of answers that the target gave without drafts."""
    import torch

    from outrider.model.loading import load_model
    from outrider.model.tokenizers import producible_ids

    torch.set_num_threads(settings.threads)
    prompts = load_prompts(settings.prompts, settings.count)
    model = load_model(path)
    progress(f"{len(prompts)} answers of the target")
    said = plain_greedy(
        model,
        [(p.category, encode(tokenizer, p.text, settings.prompt_tokens)) for p in prompts],
        new_tokens=settings.new_tokens,
        token_count=producible_ids(tokenizer, model.vocab_size),
    )
    sides: dict[str, Drafter] = {
        "ngram": NgramDrafter(),
        "suffix, own text alone": SuffixDrafter(share_outputs=False),
        "suffix": SuffixDrafter(),
    }
    categories = sorted({answer.category for answer in said})
    report = Report(
        f"Mean acceptance length at k = {settings.draft_len}, {len(said)} answers, greedy",
        ["category", *sides],
    )
    figures = {name: replay(side, said, settings.draft_len) for name, side in sides.items()}
    for category in [*categories, "all"]:
        wanted = [i for i, answer in enumerate(said) if category in ("all", answer.category)]
        sums = {name: total([of[i] for i in wanted]) for name, of in figures.items()}
        report.rows.append([category, *(_shown(of) for of in sums.values())])
        report.figures[category] = {
            name: {
                "mean_acceptance_length": of.mean_acceptance_length,
                "acceptance_rate": of.acceptance_rate,
                "draft_tokens_a_round": of.draft_tokens / max(of.rounds, 1),
            }
            for name, of in sums.items()
        }
    return report


def _shown(figures: SpeculationFigures) -> str:
    rows = figures.draft_tokens / max(figures.rounds, 1)
    return f"{figures.mean_acceptance_length:.2f} ({rows:.1f} drafted)"
