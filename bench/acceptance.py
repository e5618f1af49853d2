"""How often each rule accepts, and what its drafts weigh on the wire."""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.inprocess import DRAFTER, FOREVER_S, Answer, InProcess, Traffic
from bench.prompts import encode, load_prompts
from bench.report import Bar, Report, progress
from bench.tiny import write_noisy
from outrider.cli.models import resolve_model
from outrider.config import CACHE, setting
from outrider.drafting.draft_model import PlainDraftModel
from outrider.drafting.model import ModelDrafter
from outrider.figures import SpeculationFigures
from outrider.messages import (
    AcceptanceRule,
    Endings,
    SamplingParams,
    SpeculationOptions,
    StartSession,
)
from outrider.model.blocks import BLOCK_TOKENS
from outrider.model.embedded import EMBEDDED_MODEL
from outrider.model.loading import LoadedModel, load_model
from outrider.model.paged import PagedModel
from outrider.model.tokenizers import Tokenizer, load_tokenizer, producible_ids
from verify_worker.scheduler import Limits

# How far a rate may be off its mean with a few hundred drafted tokens.
CHANCE = 0.06


@dataclass(frozen=True, slots=True)
class Settings:
    """The pair, and what is asked of it."""

    model: str = setting(EMBEDDED_MODEL, help="The target: a path, or this name.")
    draft_model: str = setting(
        "", help="The drafter; empty makes weaker copies of the target, one a --noise."
    )
    noise: tuple[float, ...] = setting(
        (0.05, 0.1, 0.15),
        many=True,
        help="Noise on the weights of a weaker copy, over their own standard deviation.",
    )
    layers: int = setting(0, at_least=0, help="Layers that a weaker copy keeps; 0 keeps all.")
    prompts: str | None = setting(None, help="File of JSON lines with category and turns.")
    count: int = setting(10, at_least=1, help="Prompts, all at once.")
    prompt_tokens: int = setting(256, at_least=1, help="Longest prompt, in tokens.")
    new_tokens: int = setting(48, at_least=2, help="Tokens to generate.")
    draft_len: int = setting(4, at_least=1, help="Draft length k of each round.")
    temperature: tuple[float, ...] = setting(
        (0.0, 0.5, 1.0), many=True, at_least=0, help="Temperatures."
    )
    q_top: tuple[int, ...] = setting(
        (8, 64, 0), many=True, at_least=0, help="Tokens of q under the rejection rule; 0: all."
    )
    threads: int = setting(0, at_least=0, help="Threads of torch; 0 leaves it to torch.")
    cache: str = setting(CACHE, help="Directory for the embedded model and its copies.")
    bar: bool = setting(False, help="Exit with 1 when coupling accepts less than it must.")


@dataclass(frozen=True, slots=True)
class Way:
    """One way to speculate."""

    temperature: float
    rule: AcceptanceRule
    q_top: int = 0

    @property
    def name(self) -> str:
        """For the table."""
        if self.rule is AcceptanceRule.COUPLED:
            return "coupled"
        return f"rejection, q of {self.q_top or 'all'}"


def ways(settings: Settings) -> list[Way]:
    """Every combination; without a temperature both rules are the same."""
    chosen = []
    for temperature in settings.temperature:
        chosen.append(Way(temperature, AcceptanceRule.COUPLED))
        if temperature > 0:
            chosen += [Way(temperature, AcceptanceRule.REJECTION, top) for top in settings.q_top]
    return chosen


class Pair:
    """A target and a drafter with the prompts that both are asked."""

    def __init__(
        self, settings: Settings, target: LoadedModel, drafter: LoadedModel, tokenizer: Tokenizer
    ) -> None:
        texts = load_prompts(settings.prompts, settings.count)
        self.prompts = [encode(tokenizer, text.text, settings.prompt_tokens) for text in texts]
        self._settings = settings
        self._target = target
        self._drafter = drafter
        self._token_count = producible_ids(tokenizer, target.vocab_size)
        longest = max(map(len, self.prompts)) + settings.new_tokens + settings.draft_len
        self._blocks = len(self.prompts) * (-(-longest // BLOCK_TOKENS) + 1)

    def run(self, way: Way) -> tuple[list[Answer], Traffic]:
        """Every prompt at once; session n has seed n."""
        settings = self._settings
        drafter = ModelDrafter(
            PlainDraftModel(self._drafter, total_blocks=self._blocks, token_count=self._token_count)
        )
        limits = Limits(
            context_len=self._target.context_len,
            vocab_size=self._token_count,
            draft_len=settings.draft_len,
            draft_wait_s=FOREVER_S,
            q_top=way.q_top,
        )
        target = PagedModel(self._target, self._blocks)
        workers = InProcess(target, drafter, self._token_count, limits)
        starts = [
            StartSession(
                session_id=f"{number:032x}",
                epoch=1,
                token_ids=tuple(prompt),
                prompt_len=len(prompt),
                sampling=SamplingParams(way.temperature, seed=number),
                endings=Endings(settings.new_tokens, self._target.stop_ids),
                speculation=SpeculationOptions(rule=way.rule),
                drafter=DRAFTER,
            )
            for number, prompt in enumerate(self.prompts)
        ]
        return workers.run(starts), workers.traffic


def weaker_copy(target: Path, cache: Path, noise: float, layers: int) -> Path:
    """A weaker copy of the target in the cache, written if it is not there yet."""
    name = f"{target.name}-noise-{noise:g}" + (f"-layers-{layers}" if layers else "")
    where = cache.expanduser() / "models" / name
    if not (where / "config.json").is_file():
        progress(f"writing {where}")
        partial = where.with_name(f".{name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        write_noisy(target, partial, noise=noise, layers=layers)
        partial.rename(where)
    return where


def measure(settings: Settings) -> Report:
    """Every way with every drafter."""
    path = resolve_model(settings.model, settings.cache)
    target, tokenizer = load_model(path), load_tokenizer(path)
    cache = Path(settings.cache)
    drafters = [Path(settings.draft_model)] if settings.draft_model else []
    if not drafters:
        drafters = [
            weaker_copy(Path(path), cache, noise, settings.layers) for noise in settings.noise
        ]
    report = Report(
        "Acceptance and bytes",
        [
            *("drafter", "T", "rule", "accepted", "length"),
            *("B/token", "B/proposal", "B/command", "tokens/s"),
        ],
    )
    for drafter in drafters:
        pair = Pair(settings, target, load_model(str(drafter)), tokenizer)
        for way in ways(settings):
            started = time.perf_counter()
            answers, traffic = pair.run(way)
            add(report, drafter.name, way, answers, traffic, time.perf_counter() - started)
        report.bars += bounds(report, drafter.name, settings)
    return report


def bounds(report: Report, drafter: str, settings: Settings) -> list[Bar]:
    """Coupling accepts at least (1 - TV) / (1 + TV) where rejection with all of q has 1 - TV."""
    bars = []
    for temperature in settings.temperature:
        if not temperature or 0 not in settings.q_top:
            continue
        way = Way(temperature, AcceptanceRule.REJECTION)
        rejection = report.figures[f"{drafter}, {temperature:g}, {way.name}"]["acceptance_rate"]
        coupled = report.figures[f"{drafter}, {temperature:g}, coupled"]["acceptance_rate"]
        least = rejection / (2 - rejection)
        name = f"{drafter}, {temperature:g}: coupled accepts what it must"
        bars.append(Bar(name, coupled > least - CHANCE, f"{coupled:.3f}, at least {least:.3f}"))
    return bars


def add(
    report: Report,
    drafter: str,
    way: Way,
    answers: list[Answer],
    traffic: Traffic,
    seconds: float,
) -> None:
    """One row and its figures."""
    figures = SpeculationFigures()
    for answer in answers:
        figures.add(answer.figures)
    per_token = traffic.proposal_bytes / max(traffic.proposed_tokens, 1)
    per_proposal = traffic.proposal_bytes / max(traffic.proposals, 1)
    per_command = traffic.command_bytes / max(traffic.commands, 1)
    tokens = sum(len(answer.token_ids) for answer in answers)
    report.rows.append(
        [
            drafter,
            f"{way.temperature:g}",
            way.name,
            f"{figures.acceptance_rate:.3f}",
            f"{figures.mean_acceptance_length:.2f}",
            f"{per_token:.1f}",
            f"{per_proposal:.0f}",
            f"{per_command:.0f}",
            f"{tokens / seconds:.1f}",
        ]
    )
    report.figures[f"{drafter}, {way.temperature:g}, {way.name}"] = {
        "acceptance_rate": figures.acceptance_rate,
        "mean_acceptance_length": figures.mean_acceptance_length,
        "accepted_per_position": figures.accepted_per_position,
        "drafts": figures.drafts,
        "draft_tokens": figures.draft_tokens,
        "tokens": tokens,
        "bytes_per_draft_token": per_token,
        "bytes_per_proposal": per_proposal,
        "bytes_per_command": per_command,
    }
    name = f"{drafter}, {way.temperature:g}, {way.name}: drafts were verified"
    report.bars.append(Bar(name, figures.draft_tokens > 0))
    progress(f"{drafter}, {way.temperature:g}, {way.name}: {figures.acceptance_rate:.3f}")


def run(settings: Settings) -> None:
    """Measure acceptance and bytes of both rules, workers in this process."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    report = measure(settings)
    report.print()
    report.exit(enforce=settings.bar)
