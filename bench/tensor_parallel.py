"""What it costs to split a target over ranks on this machine, and where the time goes.

Tokens are compared on the model itself, times taken on one of the same size with eight heads. The
same sessions take plain steps on one rank with one thread, on one rank with two, and on two
ranks with one thread each; the sides take turns. What rank 0 spends in the connection is timed
there: control is the message of a step, encoded, sent and decoded; collectives are sums and
gathers, the wait for the other rank included.
"""

import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench.engine import VerifyEngine
from bench.local_ranks import LocalRanks
from bench.rank_memory import memory_report
from bench.rank_overlap import overlap_report
from bench.report import Bar, Report, progress
from bench.rounds import Spread, alternate, ratios
from bench.tiny import write_model
from outrider.cli.models import resolve_model
from outrider.config import CACHE, setting
from outrider.messages import SamplingParams
from outrider.model.blocks import BlockTable
from outrider.model.embedded import EMBEDDED_MODEL
from outrider.model.paged import Segment
from outrider.model.parallel import leader, messages
from outrider.model.parallel.group import RankGroup
from outrider.model.parallel.leader import ParallelModel
from outrider.sampling.rows import Row
from outrider.sampling.scores import Choosing

TINY = "tiny"
LETTERS = 24
_HEAD_SIZE = 64
CONTROL_MOST_S = 0.001
# Logits of one rank and of several, relative to the largest: in float32, and of packed weights,
# whose products are rounded to bfloat16.
LOGITS_MOST, PACKED_MOST = 1e-4, 0.1
# A near tie of packed weights, in logits.
MARGIN_MOST = 0.5


@dataclass(frozen=True, slots=True)
class Settings:
    """What is run, and how often."""

    model: str = setting(EMBEDDED_MODEL, help="The target: a path, this name, or `tiny`.")
    ranks: int = setting(2, at_least=2, help="Ranks of the split side of the comparison.")
    compare_ranks: int = setting(3, at_least=2, help="Ranks whose tokens are compared with one's.")
    sessions: int = setting(16, at_least=1, help="Sessions at once.")
    prompt_tokens: int = setting(32, at_least=1, help="Tokens of a prompt.")
    steps: int = setting(8, at_least=1, help="Steps of a turn.")
    rounds: int = setting(7, at_least=2, help="Turns of each side.")
    new_tokens: int = setting(32, at_least=1, help="Tokens of each compared completion.")
    cache: str = setting(CACHE, help="Directory for the embedded model.")
    bar: bool = setting(False, help="Exit with 1 when a bar is not met.")


@dataclass(slots=True)
class Spent:
    """Seconds and bytes on rank 0, by what they were for."""

    seconds: dict[str, float] = field(default_factory=dict)
    messages: list[bytes] = field(default_factory=list)

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, its time added up."""

        def wrapped(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                spent = time.perf_counter() - began
                self.seconds[name] = self.seconds.get(name, 0.0) + spent

        return wrapped

    def watch(self, group: RankGroup) -> None:
        """Time what this rank does in the group, and keep the messages."""
        send = self.timed("send", group.send)

        def kept(message: bytes) -> None:
            self.messages.append(message)
            send(message)

        untyped: Any = group
        untyped._wait = self.timed("waits", untyped._wait)
        untyped.send = kept


def with_even_heads(path: str, where: Path) -> str:
    """A random model like the one at `path`, but of eight heads, four for keys and values."""
    config: Any = AutoConfig.from_pretrained(path)
    config.update(
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "hidden_size": 8 * _HEAD_SIZE,
            "head_dim": _HEAD_SIZE,
        }
    )
    torch.manual_seed(0)
    made: Any = AutoModelForCausalLM
    made.from_config(config).save_pretrained(where)
    for file in Path(path).glob("tokenizer*"):
        shutil.copy(file, where)
    return str(where)


def engine_of(path: str, ranks: int, stack: ExitStack) -> VerifyEngine:
    """An engine over so many ranks."""
    others = LocalRanks() if ranks > 1 else None
    if others is not None:
        stack.callback(others.close)
    return VerifyEngine(
        path,
        threads=1,
        ranks=others,
        tensor_parallel_size=ranks,
        forward="lean",
        kv_memory="256MiB",
        prefix_cache=False,
        calibrate=False,
        rank_timeout_s=60.0,
    )


class Sides:
    """One rank with one thread and with two, and several ranks."""

    def __init__(self, path: str, settings: Settings, stack: ExitStack) -> None:
        self.split_name = f"{settings.ranks} ranks, 1 thread each"
        whole, split = engine_of(path, 1, stack), engine_of(path, settings.ranks, stack)
        self.spent = Spent()
        model: Any = split.model
        self.group: RankGroup = model._member.group
        self.spent.watch(self.group)
        encode = self.spent.timed("encode", messages.encode)
        stack.enter_context(mock.patch.object(leader, "encode", encode))
        self._settings = settings
        chance = random.Random(0)
        vocabulary = min(model.vocab_size, 20_000)
        self.prompts = [
            [chance.randrange(vocabulary) for _ in range(settings.prompt_tokens)]
            for _ in range(settings.sessions)
        ]
        self.engines = {
            "1 rank, 1 thread": (whole, 1),
            f"1 rank, {settings.ranks} threads": (whole, settings.ranks),
            self.split_name: (split, 1),
        }

    def turn(self, name: str, _: int) -> dict[str, float]:
        """Seconds of a step, its forward, and what went to the connection: medians of steps."""
        engine, threads = self.engines[name]
        torch.set_num_threads(threads)
        sessions = engine.decoding(self.prompts, self._settings.steps + 4)
        found: list[dict[str, float]] = []
        for _ in range(self._settings.steps):
            self.spent.seconds.clear()
            self.spent.messages.clear()
            step = engine.step()
            found.append({"step": step.seconds, "model": step.phases["forward"]})
            if name == self.split_name:
                found[-1] |= self._connection()
        for session in sessions:
            engine.close(session)
        # Others use the machine too: a step in the middle tells more than their mean.
        return {key: statistics.median(one[key] for one in found) for key in found[0]}

    def _connection(self) -> dict[str, float]:
        spent, sent = self.spent.seconds, self.spent.messages
        began = time.perf_counter()
        for message in sent:
            messages.decode(message)
        decoded = time.perf_counter() - began
        return {
            "control": spent["encode"] + spent["send"] + decoded,
            "encode": spent["encode"],
            "send": spent["send"],
            "decode": decoded,
            "collectives": spent["waits"],
            "bytes": float(sum(map(len, sent))),
        }


@dataclass(frozen=True, slots=True)
class Compared:
    """What `compare_ranks` ranks say and what one says.

    `apart`: logits, relative to the largest. `margins`: by how much one rank prefers its token
    where a text first differs, in logits.
    """

    apart: float
    texts: int
    margins: tuple[float, ...]

    def bar(self, ranks: int, *, packed: bool) -> Bar:
        """Plain products are the same but for the order of sums; packed ones are rounded."""
        said = f"logits {self.apart:.1e} apart, {self.texts - len(self.margins)} of {self.texts} "
        said += "texts the same"
        if self.margins:
            said += f", others part at a margin of at most {max(self.margins):.2g}"
        met = self.apart < LOGITS_MOST and not self.margins
        if packed:
            met = self.apart < PACKED_MOST and max(self.margins, default=0.0) < MARGIN_MOST
        return Bar(f"{ranks} ranks say what one says", met, said)


def compare(path: str, settings: Settings, stack: ExitStack) -> Compared:
    """Logits and greedy tokens of one rank and of `compare_ranks` ranks."""
    one, several = engine_of(path, 1, stack), engine_of(path, settings.compare_ranks, stack)
    chance = random.Random(1)
    vocabulary = min(one.model.vocab_size, 20_000)
    prompts = [[chance.randrange(vocabulary) for _ in range(24)] for _ in range(8)]
    logits = [_logits(engine.model, prompts[0]) for engine in (one, several)]
    apart = float((logits[0] - logits[1]).abs().max() / logits[0].abs().max())
    said = [engine.complete(prompts, settings.new_tokens).token_ids for engine in (one, several)]
    assert isinstance(several.model, ParallelModel)
    several.model.stop()
    margins = []
    for prompt, text, other in zip(prompts, *said, strict=True):
        place = next(
            (i for i, pair in enumerate(zip(text, other, strict=True)) if len({*pair}) > 1), None
        )
        if place is not None:
            row = _logits(one.model, [*prompt, *text[:place]])[-1]
            margins.append(float(row[text[place]] - row[other[place]]))
    return Compared(apart, len(prompts), tuple(margins))


def _logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    table = BlockTable()
    model.pool.grow(table, len(tokens))
    found: torch.Tensor = model.forward([Segment(tokens, table, len(tokens))])
    model.pool.release(table)
    return found


def rows_report(settings: Settings, model: Any, rank_count: int) -> Report:
    """The same rows, their tokens found where the logits are, and brought together whole."""
    chance = random.Random(2)
    samplings = {
        "drawn where they are": SamplingParams(temperature=1.0, seed=1),
        "whole rows, for top-p": SamplingParams(temperature=1.0, seed=1, top_p=0.9),
    }
    table = BlockTable()
    model.pool.grow(table, settings.sessions)
    tokens = [chance.randrange(min(model.vocab_size, 20_000)) for _ in range(settings.sessions)]

    def seconds(sampling: SamplingParams, _: int) -> float:
        rows = [Row(sampling, tokens[: place + 1]) for place in range(len(tokens))]
        began = time.perf_counter()
        choosing = Choosing(rows, [], model.vocab_size)
        scores = model.score([Segment(tokens, table, len(rows))], choosing)
        for place in range(len(rows)):
            assert scores.targets[place] is not None
        return time.perf_counter() - began

    sides = {name: partial(seconds, sampling) for name, sampling in samplings.items()}
    found = alternate(sides, 2 * settings.rounds)
    model.pool.release(table)
    title = f"Tokens of {settings.sessions} rows; ms, median (quartiles)"
    report = Report(title, ["", "step with its tokens", "bytes to rank 0 from each other rank"])
    each = -(-model.vocab_size // rank_count)
    for name, size in zip(found, (24, 4 * each), strict=True):
        spread = Spread.of(found[name]).times(1000)
        report.rows.append([name, spread, settings.sessions * size])
        report.figures[name] = {"ms": spread.median, "bytes": settings.sessions * size}
    return report


def step_report(settings: Settings, sides: Sides) -> Report:
    """The sides in turns."""
    turns = {name: partial(sides.turn, name) for name in sides.engines}
    found = alternate(turns, settings.rounds)
    report = Report(
        f"A step of {settings.sessions} sessions, one row each; ms, median (quartiles)",
        ["side", "step", "model", "over 1 rank, 1 thread"],
    )
    first, *_ = found
    base = [turn["step"] for turn in found[first]]
    for name, turned in found.items():
        spreads = {
            key: Spread.of([turn[key] * 1000 for turn in turned]) for key in ("step", "model")
        }
        over = ratios([turn["step"] for turn in turned], base)
        report.rows.append([name, spreads["step"], spreads["model"], over])
        report.figures[name] = {
            "step_ms": spreads["step"].median,
            "model_ms": spreads["model"].median,
            "ratio": over.median,
        }
    split = found[sides.split_name]
    parts = {
        "compute": [t["model"] - t["control"] - t["collectives"] for t in split],
        "collectives": [t["collectives"] for t in split],
        "control": [t["control"] for t in split],
        "  encode": [t["encode"] for t in split],
        "  send": [t["send"] for t in split],
        "  decode": [t["decode"] for t in split],
        "everything else": [t["step"] - t["model"] for t in split],
    }
    for name, seconds in parts.items():
        spread = Spread.of([value * 1000 for value in seconds])
        report.rows.append([f"  of it: {name}", spread, "", ""])
        report.figures[name] = {"ms": spread.median}
    size = Spread.of([turn["bytes"] for turn in split])
    report.rows.append(["  bytes of a message", size, "", ""])
    report.figures["message_bytes"] = size.median
    control_s = Spread.of(parts["control"]).median
    met = control_s < CONTROL_MOST_S
    said = f"{control_s * 1e6:.0f} us, {size.median:.0f} bytes"
    report.bars.append(Bar("less than 1 ms of control a step", met, said))
    return report


def run(settings: Settings) -> None:
    """What a step costs on several ranks over one, where the time goes, and what ranks load."""
    os.environ["OMP_NUM_THREADS"] = "1"  # of the other ranks
    with ExitStack() as stack:
        where = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outrider-bench-")))
        if settings.model == TINY:
            path = str(write_model(where / TINY, letters=LETTERS))
        else:
            path = resolve_model(settings.model, settings.cache)
        packed = path.endswith(".gguf")
        loading = memory_report(path, (1, 2, 4) if path.endswith(TINY) else (1, 3))
        loading.show()
        progress("comparing tokens")
        with ExitStack() as stack_of_compared:
            compared = compare(path, settings, stack_of_compared)
        progress("taking turns")
        if settings.model != TINY and not packed:
            # The embedded model has nine heads, which two ranks can't share.
            path = with_even_heads(path, where / "even")
        sides = Sides(path, settings, stack)
        report = step_report(settings, sides)
        split, _ = sides.engines[sides.split_name]
        rows = rows_report(settings, split.model, settings.ranks)
        rows.show()
        beside = overlap_report(split.target, sides.prompts, 4 * settings.steps)
        beside.show()
    report.bars.append(compared.bar(settings.compare_ranks, packed=packed))
    report.figures |= {
        "loading": loading.figures,
        "rows": rows.figures,
        "beside": beside.figures,
        "logits_apart": compared.apart,
    }
    report.bars += loading.bars
    report.print()
    report.exit(enforce=settings.bar)
