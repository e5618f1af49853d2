"""Drafters on the target's own answers: how much is accepted, and what a proposed token costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import draft_cost
from bench.answers import Said, plain_greedy
from bench.drafters import KINDS, build, choose_all, stack_settings
from bench.engine import VerifyEngine
from bench.lookup import document
from bench.prompts import encode, load_prompts
from bench.replay import replay, total
from bench.report import Bar, Report, progress
from draft_worker.config import MODEL
from outrider.cli.models import resolve_model
from outrider.config import CACHE, setting
from outrider.drafting.base import Drafter
from outrider.errors import ConfigError
from outrider.figures import SpeculationFigures
from outrider.local.commands import StackSettings
from outrider.messages import Price
from outrider.model.embedded import EMBEDDED_MODEL
from outrider.model.loading import load_model
from outrider.model.tokenizers import Tokenizer, load_tokenizer, producible_ids

# What a drafter must reach over all prompts, and what a token of it may cost, in steps.
LEAST_LENGTH, MOST_COST = 2.0, 0.06
ALL = "all"
# The price of a second, over that of a token, where a token more takes a step a millisecond longer.
_SECOND = 1000.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What to draft for, and with what."""

    model: str = setting(EMBEDDED_MODEL, help="The target: a path, or this name.")
    drafter: tuple[str, ...] = setting((MODEL,), many=True, choices=KINDS, help="Drafters.")
    draft_model: tuple[str, ...] = setting(
        (),
        many=True,
        help="For --drafter model and hybrid, each of which is taken with each; the embedded model "
        "has its own.",
    )
    prompts: str | None = setting(None, help="File of JSON lines with category and turns.")
    count: int = setting(240, at_least=1, help="Prompts, taken from the categories in turn.")
    context: int = setting(
        1024,
        at_least=32,
        help="Tokens of a prompt and its answer, prompts being cut to fit; and those before a "
        "proposal that is timed.",
    )
    new_tokens: int = setting(128, at_least=2, help="Most tokens of an answer.")
    draft_len: int = setting(4, at_least=1, help="Draft length k of each round.")
    price: float = setting(
        0.0,
        at_least=0,
        help="Committed tokens that one in a draft costs, for drafters that make trees of what is "
        "worth it; 0 asks for chains of k tokens.",
    )
    rounds: int = setting(30, at_least=0, help="Proposals to time; 0 times none.")
    threads: int = setting(
        0, at_least=0, help="Threads of target and drafter while timed; 0: those of a local stack."
    )
    cache: str = setting(CACHE, help="Directory for the embedded model and the answers.")
    bar: bool = setting(False, help="Exit with 1 when a bar is not met.")

    def __post_init__(self) -> None:
        choose_all(self.drafter, self.draft_model, self.model)
        if self.new_tokens >= self.context:
            raise ConfigError("--new-tokens has to leave room for a prompt in --context")


def run(settings: Settings) -> None:
    """Acceptance and cost of drafters, on what the target says without them."""
    path = resolve_model(settings.model, settings.cache)
    tokenizer = load_tokenizer(path)
    said = answers(path, tokenizer, settings)
    flags = choose_all(settings.drafter, settings.draft_model, settings.model)
    choices = [choice.resolved(settings.cache) for choice in flags]
    served = {c.name: stack_settings(c, path, settings.threads) for c in choices}
    # What is measured while they load is measured with the threads that they will have.
    drafters = {c.name: build(c, path, served[c.name].model_threads) for c in choices}
    accepted: dict[str, list[SpeculationFigures]] = {}
    for name, drafter in drafters.items():
        progress(f"{name}: {len(said)} answers")
        price = Price(settings.price, settings.price * _SECOND)
        accepted[name] = replay(drafter, said, settings.draft_len, price)
    categories = [answer.category for answer in said]
    report = acceptance_report(accepted, categories, settings.draft_len)
    positions = position_report(accepted, settings.draft_len)
    # All bars come last.
    report.bars, bars = [], report.bars
    report.show()
    positions.show()
    costs = cost_report(path, tokenizer, served, drafters, settings)
    costs.bars = [*bars, *costs.bars]
    costs.figures = {
        "acceptance": report.figures,
        "by_position": positions.figures,
        "cost": costs.figures,
    }
    costs.print()
    costs.exit(enforce=settings.bar)


def answers(path: str, tokenizer: Tokenizer, settings: Settings) -> list[Said]:
    """What the target says to each prompt, kept beside the embedded model."""
    prompts = load_prompts(settings.prompts, settings.count)
    longest = settings.context - settings.new_tokens
    model = load_model(path)
    return plain_greedy(
        model,
        [(prompt.category, encode(tokenizer, prompt.text, longest)) for prompt in prompts],
        new_tokens=settings.new_tokens,
        token_count=producible_ids(tokenizer, model.vocab_size),
        keep=Path(settings.cache).expanduser() / "answers",
    )


def mean_length(figures: SpeculationFigures, texts: int) -> float:
    """Tokens of a round on average, of `texts` texts.

    The step that reads a prompt can't have a draft and does not count as a round, as usual.
    """
    rounds = figures.rounds - texts
    return 1 + figures.accepted_tokens / rounds if rounds > 0 else 1.0


def by_position(figures: SpeculationFigures, draft_len: int) -> list[float]:
    """Of the drafts that were right up to a position, the share whose token there was right.

    A draft that ends before it counts as wrong there.
    """
    counts = [figures.drafts, *figures.accepted_per_position]
    counts += [0] * (draft_len + 1 - len(counts))
    return [
        counts[position + 1] / counts[position] if counts[position] else 0.0
        for position in range(draft_len)
    ]


def acceptance_report(
    accepted: Mapping[str, Sequence[SpeculationFigures]], categories: Sequence[str], draft_len: int
) -> Report:
    """Mean acceptance lengths: a line a category, a column a drafter."""
    report = Report(
        f"Mean acceptance length at k = {draft_len}, greedy", ["category", "answers", *accepted]
    )
    for category in [*sorted(set(categories)), ALL]:
        wanted = [n for n, of in enumerate(categories) if category in (ALL, of)]
        row: list[object] = [category, len(wanted)]
        report.figures[category] = {"answers": len(wanted)}
        for name, of_each in accepted.items():
            figures = total([of_each[n] for n in wanted])
            length = mean_length(figures, len(wanted))
            row.append(f"{length:.2f}")
            report.figures[category][name] = _figures(figures, length)
            if category == ALL:
                title = f"{name}: mean acceptance length of {LEAST_LENGTH:g} at least"
                report.bars.append(Bar(title, length >= LEAST_LENGTH, f"{length:.2f}"))
        report.rows.append(row)
    return report


def _figures(figures: SpeculationFigures, length: float) -> dict[str, Any]:
    return {
        "mean_acceptance_length": length,
        "acceptance_rate": figures.acceptance_rate,
        "draft_tokens_a_round": figures.draft_tokens / max(figures.rounds, 1),
        "rounds": figures.rounds,
    }


def position_report(accepted: Mapping[str, Sequence[SpeculationFigures]], draft_len: int) -> Report:
    """Acceptance by position: a line a position, a column a drafter."""
    shares = {name: by_position(total(of_each), draft_len) for name, of_each in accepted.items()}
    report = Report("Accepted, all before being accepted", ["position", *accepted])
    for position in range(draft_len):
        row = [f"{of_each[position]:.3f}" for of_each in shares.values()]
        report.rows.append([position + 1, *row])
    report.figures = dict(shares)
    return report


def cost_report(
    path: str,
    tokenizer: Tokenizer,
    served: Mapping[str, StackSettings],
    drafters: Mapping[str, Drafter],
    settings: Settings,
) -> Report:
    """What a token of each drafter costs, with the threads that it is served with."""
    title = f"One of {settings.draft_len} proposed tokens after {settings.context}"
    if not settings.rounds:
        return Report(f"{title}: not timed", ["drafter"])
    engine = VerifyEngine(path, threads=max(stack.model_threads for stack in served.values()))
    tokens = draft_cost.text_tokens(settings.context, settings.rounds, engine.context_len)
    text = document(tokenizer, tokens)
    costs: dict[str, draft_cost.Cost] = {}
    for name, drafter in drafters.items():
        progress(f"{name}: {settings.rounds} proposals")
        costs[name] = draft_cost.measure(
            engine,
            drafter,
            text,
            context=settings.context,
            draft_len=settings.draft_len,
            rounds=settings.rounds,
            target_threads=served[name].model_threads,
            draft_threads=served[name].model_threads,
        )
    report = draft_cost.report_of(costs, title)
    for name, figures in report.figures.items():
        over = figures["over_step"]["median"]
        title = f"{name}: a token costs at most {MOST_COST:g} of a step"
        report.bars.append(Bar(title, over <= MOST_COST, f"{over:.3f}"))
    return report
