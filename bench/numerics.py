"""What `--numerics invariant` costs, and how often `fast` says another token.

A token flips when a row's logits, computed in a step of its own and as part of a draft,
choose differently. Text is written by plain steps and run again as chains of 5 and 9 rows,
each with a KV of its own, as a session with speculation would have it.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from bench.prompts import encode, load_prompts
from bench.report import Bar, Report, progress
from outrider.cli.models import resolve_model
from outrider.config import CACHE, setting
from outrider.messages import SamplingParams
from outrider.model.blocks import BLOCK_TOKENS, BlockTable
from outrider.model.embedded import EMBEDDED_MODEL
from outrider.model.loading import load_model
from outrider.model.numerics import COMPILED, FAST, INVARIANT, LEAN, choose_numerics
from outrider.model.paged import PagedModel, Segment
from outrider.model.tokenizers import load_tokenizer
from outrider.sampling.coupled import target_tokens
from outrider.sampling.rows import Row

CHAINS = (5, 9)
# A whole number of both.
_BLOCK = 45
# What is compared: both numerics over torch's operators, and the compiled forward, which is both.
KINDS = (FAST, INVARIANT, COMPILED)
_POOL_BLOCKS = 512
# Sessions and rows of each in the steps that are timed; the context is shared by all.
STEPS = {
    "1 row": (1, 1),
    "5 rows, 1 session": (1, 5),
    "9 rows, 1 session": (1, 9),
    "9 rows, 9 sessions": (9, 1),
    "32 rows, 32 sessions": (32, 1),
    "36 rows, 4 sessions": (4, 9),
    "256 rows, a prompt": (1, 256),
}
# Margins below this, in logits, tell how many near ties there are.
_NEAR = 0.25
PER = 100_000


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure."""

    model: str = setting(EMBEDDED_MODEL, help="The target: a path, or this name.")
    prompts: str | None = setting(None, help="File of JSON lines with category and turns.")
    dtypes: tuple[str, ...] = setting(
        ("float32", "bfloat16"), many=True, choices=("float32", "bfloat16"), help="Types to try."
    )
    tokens: int = setting(2000, at_least=_BLOCK, help="Tokens of text for each type, with fast.")
    invariant_tokens: int = setting(450, at_least=_BLOCK, help="The same with invariant.")
    text_len: int = setting(270, at_least=_BLOCK, help="Tokens of one text.")
    repeats: int = setting(9, at_least=1, help="Times that each step is timed.")
    context: int = setting(192, at_least=16, help="Tokens before the steps that are timed.")
    threads: int = setting(0, at_least=0, help="Threads of torch; 0 leaves it to torch.")
    seed: int = setting(7, at_least=0, help="Of the texts.")
    cache: str = setting(CACHE, help="Directory for the embedded model.")
    bar: bool = setting(False, help="Exit with 1 when a token flips with invariant.")


@dataclass(slots=True)
class Flips:
    """Rows of chains of one length against the same rows in steps of their own."""

    rows: int = 0
    equal_bits: int = 0
    greedy: int = 0
    sampled: int = 0
    sampled_expected: float = 0.0
    near: int = 0
    shifts: float = 0.0

    def add(self, plain: torch.Tensor, chained: torch.Tensor, rows: Sequence[Row]) -> None:
        """Compare logits [R, V] of the same rows."""
        self.rows += len(rows)
        differs = (plain != chained).any(-1)
        self.equal_bits += int((~differs).sum())
        self.greedy += int((plain.argmax(-1) != chained.argmax(-1)).sum())
        pairs = zip(target_tokens(plain, rows), target_tokens(chained, rows), strict=True)
        self.sampled += sum(a != b for a, b in pairs)
        self.sampled_expected += float((flip_probability(plain, chained) * differs).sum())
        best = plain.topk(2).indices
        margin, moved = (_margin(logits, best) for logits in (plain, chained))
        self.near += int((margin < _NEAR).sum())
        self.shifts += float((margin - moved).abs().sum())

    @property
    def greedy_expected(self) -> float:
        """Flips to expect from how close ties are and how far margins shift.

        With margins of density f near 0 and a shift d to either side, a row flips with
        probability f * E|d| / 2.
        """
        return self.near / _NEAR * (self.shifts / self.rows) / 2


def _margin(logits: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """How far the first of the two tokens is above the second: [R]."""
    chosen = logits.gather(-1, best)
    return chosen[:, 0] - chosen[:, 1]


def flip_probability(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The chance, over the noise, that two rows of logits [R, V] choose different tokens: [R].

    With p = softmax(a), q = softmax(b) and the same Gumbel noise on both, both choose v with
    probability 1 / sum_u max(p_u / p_v, q_u / q_v): the chance that v's exponential clock
    rings first by both scales. Tokens in the order of q/p turn the sums into running totals.
    """
    p, q = a.double().softmax(-1), b.double().softmax(-1)
    order = (q / p).argsort(-1)
    p, q = p.gather(-1, order), q.gather(-1, order)
    # Tokens up to v weigh more under p, those after it under q.
    upto, after = p.cumsum(-1), 1 - q.cumsum(-1)
    same = 1 / (upto / p + after.clamp_min(0) / q)
    return (1 - same.sum(-1)).clamp_min(0)


@dataclass(slots=True)
class Subject:
    """The model with one kind of numerics."""

    paged: PagedModel
    flips: dict[int, Flips] = field(default_factory=lambda: {k: Flips() for k in CHAINS})

    def feed(self, table: BlockTable, tokens: Sequence[int], logit_rows: int) -> torch.Tensor:
        """Run tokens and keep their KV."""
        self.paged.pool.grow(table, table.kv_len + len(tokens))
        logits = self.paged.forward([Segment(tokens, table, logit_rows)])
        table.kv_len += len(tokens)
        return logits

    def write(self, prompt: Sequence[int], length: int, seed: int, stop: frozenset[int]) -> int:
        """Write a text in plain steps, run it again in chains, compare: tokens compared."""
        sampling = SamplingParams(temperature=1.0, seed=seed)
        text = list(prompt)
        tables = {k: BlockTable() for k in (1, *CHAINS)}
        for table in tables.values():
            self.feed(table, text[:-1], 0)
        while len(text) < len(prompt) + length and not stop.intersection(text[len(prompt) :]):
            begin = len(text) - 1
            logits = []
            for _ in range(_BLOCK):
                logits.append(self.feed(tables[1], text[-1:], 1))
                text += target_tokens(logits[-1], [Row(sampling, text)])
            plain = torch.cat(logits)
            rows = [Row(sampling, text[: begin + 1 + row]) for row in range(_BLOCK)]
            for k in CHAINS:
                pieces = [text[at : at + k] for at in range(begin, begin + _BLOCK, k)]
                chained = torch.cat([self.feed(tables[k], piece, k) for piece in pieces])
                self.flips[k].add(plain, chained, rows)
        for table in tables.values():
            self.paged.pool.release(table)
        return len(text) - len(prompt)

    def step_times(self, context: Sequence[int]) -> "Steps":
        """Steps to time, after the same context."""
        return Steps(self.paged, context)


class Steps:
    """Steps of every size in `STEPS`, ready to be run again and again."""

    def __init__(self, paged: PagedModel, context: Sequence[int]) -> None:
        self._paged = paged
        shared = BlockTable()
        paged.pool.grow(shared, len(context))
        paged.forward([Segment(context, shared, 0)])
        self._tables = []
        for _ in range(max(sessions for sessions, _ in STEPS.values())):
            table = BlockTable(list(shared.blocks), len(context))
            paged.pool.grow(table, len(context) + 16)
            self._tables.append(table)
        self._prompt = BlockTable()
        paged.pool.grow(self._prompt, 256)
        self._tokens = (list(context) * 256)[:256]

    def seconds(self, name: str) -> float:
        """Run one step of that size."""
        sessions, rows = STEPS[name]
        tables = [self._prompt] if rows > BLOCK_TOKENS else self._tables[:sessions]
        wanted = 1 if rows > BLOCK_TOKENS else rows
        segments = [Segment(self._tokens[:rows], table, wanted) for table in tables]
        started = time.perf_counter()
        self._paged.forward(segments)
        return time.perf_counter() - started


def measure_steps(
    subjects: dict[str, Subject], context: Sequence[int], repeats: int
) -> dict[str, dict[str, float]]:
    """Median seconds of each step for each kind of numerics, the kinds taking turns."""
    steps = {name: subject.step_times(context) for name, subject in subjects.items()}
    medians: dict[str, dict[str, float]] = {}
    for size in STEPS:
        times: dict[str, list[float]] = {name: [] for name in steps}
        for repeat in range(repeats + 1):
            for name in steps if repeat % 2 else reversed(steps):
                times[name].append(steps[name].seconds(size))
        # The first time is slower: kernels are made for the shape.
        medians[size] = {name: statistics.median(values[1:]) for name, values in times.items()}
    return medians


def texts(prompts: Sequence[Sequence[int]], seed: int) -> Iterator[tuple[Sequence[int], int]]:
    """Prompts and seeds without end."""
    while True:
        for prompt in prompts:
            yield prompt, seed
        seed += 1


def add_steps(report: Report, dtype: str, medians: dict[str, dict[str, float]]) -> None:
    """The lines of the step times."""
    for size, seconds in medians.items():
        cells = [
            f"{seconds[kind] * 1e3:.1f} ({seconds[kind] / seconds[FAST]:.2f}x)"
            if kind in seconds
            else ""
            for kind in KINDS
        ]
        report.rows.append([f"{size}, ms", dtype, *cells])


def add_flips(report: Report, dtype: str, subjects: dict[str, Subject]) -> None:
    """The lines of the flips and what must hold of them."""
    lines: dict[str, Callable[[Flips], object]] = {
        "rows with equal bits": lambda f: f"{f.equal_bits} of {f.rows}",
        "greedy flips": lambda f: f"{f.greedy} of {f.rows}",
        f"greedy flips per {PER}, from margins": lambda f: f.greedy_expected / f.rows * PER,
        "sampled flips": lambda f: f"{f.sampled} of {f.rows}",
        f"sampled flips per {PER}, over all noise": lambda f: f.sampled_expected / f.rows * PER,
    }
    for k in CHAINS:
        for name, cell in lines.items():
            cells = [cell(subjects[kind].flips[k]) if kind in subjects else "" for kind in KINDS]
            report.rows.append([f"chain of {k}: {name}", dtype, *cells])
        for kind in (name for name in (INVARIANT, COMPILED) if name in subjects):
            held = subjects[kind].flips[k]
            flips = held.greedy + held.sampled
            report.bars += [
                Bar(f"{dtype}, chain of {k}: {kind} never flips", flips == 0),
                Bar(f"{dtype}, chain of {k}: {kind} keeps every bit", held.equal_bits == held.rows),
            ]


def run(settings: Settings) -> None:
    """Cost of invariant numerics, and how often fast ones flip a token."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    path = resolve_model(settings.model, settings.cache)
    tokenizer = load_tokenizer(path)
    prompts = [encode(tokenizer, p.text, 128) for p in load_prompts(settings.prompts, 10)]
    context = (prompts[0] * settings.context)[: settings.context // BLOCK_TOKENS * BLOCK_TOKENS]
    report = Report("Numerics", ["what", "type", *KINDS])
    for dtype in settings.dtypes:
        subjects = {}
        for name in KINDS if dtype == "float32" else (FAST, INVARIANT):
            started = time.perf_counter()
            model = load_model(path, dtype=dtype)
            numerics = (
                choose_numerics(FAST, model, forward=COMPILED)
                if name == COMPILED
                else choose_numerics(name, model, forward=LEAN)
            )
            subjects[name] = Subject(PagedModel(model, _POOL_BLOCKS, numerics))
            progress(f"{dtype}, {name}: loaded in {time.perf_counter() - started:.1f} s")
        medians = measure_steps(subjects, context, settings.repeats)
        add_steps(report, dtype, medians)
        progress(f"{dtype}: steps timed")
        for name in subjects:
            wanted = settings.invariant_tokens if name == INVARIANT else settings.tokens
            done = 0
            for prompt, seed in texts(prompts, settings.seed):
                length = min(settings.text_len, wanted - done)
                done += subjects[name].write(prompt, length, seed, model.stop_ids)
                progress(f"{dtype}, {name}: {done} of {wanted} tokens")
                if done >= wanted:
                    break
        add_flips(report, dtype, subjects)
        report.figures[dtype] = {
            "seconds": medians,
            "threads": torch.get_num_threads(),
            "flips": {
                name: {
                    k: {
                        "rows": f.rows,
                        "equal_bits": f.equal_bits,
                        "greedy": f.greedy,
                        "greedy_expected": f.greedy_expected,
                        "sampled": f.sampled,
                        "sampled_expected": f.sampled_expected,
                    }
                    for k, f in subject.flips.items()
                }
                for name, subject in subjects.items()
            },
        }
    report.print()
    report.exit(enforce=settings.bar)
