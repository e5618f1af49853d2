"""What it costs to split a target over ranks on this machine, and where the time goes.

Seeded texts with drafts are compared on the model itself, times taken on one of the same size with
eight heads. The same sessions take plain steps on one rank with one thread, on one rank with two,
and on two ranks with one thread each; the sides take turns. What rank 0 spends in the connection is
timed there: control is the message of a step, encoded, sent and (by the others) decoded; of each
sum and gather the wait for the other rank is told from the sum itself (`rank_spent`). Its own
compute is what it runs of a step outside of these. Each part is timed by itself, so that what
they leave of a step shows whether one is missing.
"""

import os
import random
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
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
from bench.rank_rows import rows_report
from bench.rank_spent import Arrivals, Spent
from bench.rank_texts import margins, requests_of, say
from bench.report import Bar, Report, progress
from bench.rounds import Spread, alternate, ratios
from bench.tiny import write_model
from outrider.cli.models import resolve_model
from outrider.config import CACHE, setting
from outrider.errors import UnsupportedModelError
from outrider.model.blocks import BlockTable
from outrider.model.embedded import EMBEDDED_MODEL
from outrider.model.paged import Segment
from outrider.model.parallel import leader, messages
from outrider.model.parallel.group import RankGroup
from outrider.model.parallel.leader import ParallelModel
from outrider.model.parallel.outline import outline_shard

TINY = "tiny"
LETTERS = 24
_HEAD_SIZE = 64
CONTROL_MOST_S = 0.001
# Logits of one rank and of several, relative to the largest: in float32, and of packed weights,
# whose products are rounded to bfloat16.
LOGITS_MOST, PACKED_MOST = 1e-4, 0.1
# A near tie of packed weights, in scores.
MARGIN_MOST = 0.5


@dataclass(frozen=True, slots=True)
class Settings:
    """What is run, and how often."""

    model: str = setting(EMBEDDED_MODEL, help="The target: a path, this name, or `tiny`.")
    ranks: int = setting(2, at_least=2, help="Ranks of the split side of the comparison.")
    compare_ranks: int = setting(
        0, at_least=0, help="Ranks whose tokens are compared with one's; 0: 3, or what can be."
    )
    sessions: int = setting(16, at_least=1, help="Sessions at once.")
    prompt_tokens: int = setting(32, at_least=1, help="Tokens of a prompt.")
    steps: int = setting(8, at_least=1, help="Steps of a turn.")
    rounds: int = setting(7, at_least=2, help="Turns of each side.")
    requests: int = setting(100, at_least=8, help="Seeded requests that are compared, 8 at once.")
    new_tokens: int = setting(16, at_least=1, help="Tokens of each compared completion.")
    cache: str = setting(CACHE, help="Directory for the embedded model.")
    bar: bool = setting(False, help="Exit with 1 when a bar is not met.")


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


def ranks_to_compare(path: str, wanted: int) -> int:
    """`wanted`, or for 0 the first of 3, 2 and 4 that a model can be split over; reads its config.

    Raises:
        UnsupportedModelError: it can't be split so, with the figures.
    """
    packed = path.endswith(".gguf")
    for ranks in (3, 2) if not wanted else ():
        with suppress(UnsupportedModelError):
            outline_shard(path, 0, ranks, packed=packed)
            return ranks
    outline_shard(path, 0, wanted or 4, packed=packed)
    return wanted or 4


def engine_of(
    path: str, ranks: int, stack: ExitStack, arrivals: Arrivals | None = None
) -> VerifyEngine:
    """An engine over so many ranks."""
    others = LocalRanks(arrivals=arrivals) if ranks > 1 else None
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
        arrivals = Arrivals(settings.ranks)
        self.spent = Spent(arrivals)
        watched = arrivals.watched(self.spent.note_left)
        stack.enter_context(mock.patch.object(RankGroup, "_wait", watched))
        whole = engine_of(path, 1, stack)
        split = engine_of(path, settings.ranks, stack, arrivals)
        model: Any = split.model
        self.group: RankGroup = model._member.group
        self.spent.watch(self.group)
        self.spent.watch_runs(model._member)
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
        """Seconds of the step in the middle, by parts, and processors busy with this process."""
        engine, threads = self.engines[name]
        torch.set_num_threads(threads)
        sessions = engine.decoding(self.prompts, self._settings.steps + 4)
        found: list[dict[str, float]] = []
        for _ in range(self._settings.steps):
            self.spent.clear()
            busy_s = time.process_time()
            step = engine.step()
            busy_s = time.process_time() - busy_s
            parts = {"step": step.seconds, "model": step.phases["forward"]}
            found.append(parts | {"processors": busy_s / step.seconds})
            if name == self.split_name:
                found[-1] |= self._connection()
        for session in sessions:
            engine.close(session)
        # Others use the machine too: a step in the middle tells more than their mean. A whole
        # one, so that its parts add up.
        return sorted(found, key=lambda one: one["step"])[len(found) // 2]

    def _connection(self) -> dict[str, float]:
        spent, sent = self.spent.seconds, self.spent.messages
        collectives = self.spent.collectives()
        began = time.perf_counter()
        for message in sent:
            messages.decode(message)
        decoded = time.perf_counter() - began
        return {
            "compute": self.spent.computed_s,
            "encode": spent["encode"],
            "send": spent["send"],
            "decode": decoded,
            "waiting": sum(one.waited_s for one in collectives),
            "summing": sum(one.summed_s for one in collectives),
            "collectives": float(len(collectives)),
            "bytes": float(sum(map(len, sent))),
        }


@dataclass(frozen=True, slots=True)
class Compared:
    """What `compare_ranks` ranks say and what one says.

    `apart`: logits, relative to the largest. `margins`: by how much one rank prefers its token
    where a text first differs, in scores. `accepted`: tokens of drafts that several ranks took.
    """

    apart: float
    texts: int
    margins: tuple[float, ...]
    accepted: int

    def bar(self, ranks: int, *, packed: bool) -> Bar:
        """Plain products are the same but for the order of sums; packed ones are rounded."""
        said = f"logits {self.apart:.1e} apart, {self.texts - len(self.margins)} of {self.texts} "
        said += f"seeded texts the same, {self.accepted} drafted tokens in them"
        if self.margins:
            said += f", others part at a margin of at most {max(self.margins):.2g}"
        met = self.apart < LOGITS_MOST and not self.margins
        if packed:
            met = self.apart < PACKED_MOST and max(self.margins, default=0.0) < MARGIN_MOST
        met = met and self.accepted > 0
        return Bar(f"{ranks} ranks say what one says", met, said)


def compare(path: str, settings: Settings, stack: ExitStack) -> Compared:
    """Logits and seeded texts with drafts of one rank and of `compare_ranks` ranks."""
    one, several = engine_of(path, 1, stack), engine_of(path, settings.compare_ranks, stack)
    requests = requests_of(settings.requests, min(one.target.token_count, 20_000))
    prompt = [token for request in requests for token in request.prompt][:24]
    logits = [_logits(engine.model, prompt) for engine in (one, several)]
    apart = float((logits[0] - logits[1]).abs().max() / logits[0].abs().max())
    plain = say(one.target, requests, settings.new_tokens)
    own, other = (
        say(engine.target, requests, settings.new_tokens, plain.texts) for engine in (one, several)
    )
    assert isinstance(several.model, ParallelModel)
    several.model.stop()
    found = tuple(margins(one.target, requests, own.texts, other.texts))
    return Compared(apart, len(requests), found, other.accepted)


def _logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    table = BlockTable()
    model.pool.grow(table, len(tokens))
    found: torch.Tensor = model.forward([Segment(tokens, table, len(tokens))])
    model.pool.release(table)
    return found


def parts_of(turns: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Seconds of rank 0 by turn; each is timed by itself, and together they make a step.

    What another rank does to read a message is part of rank 0's waiting, not of its own time.
    """
    shown = {
        "own compute": "compute",
        "rank 0 waits in collectives": "waiting",
        "collectives themselves": "summing",
        "control: encode": "encode",
        "control: send": "send",
    }
    spent = {name: [turn[key] for turn in turns] for name, key in shown.items()}
    other = [turn["step"] - turn["model"] for turn in turns]
    return {**spent, "plan, decide, apply": other}


def step_report(settings: Settings, sides: Sides) -> Report:
    """The sides in turns."""
    turns = {name: partial(sides.turn, name) for name in sides.engines}
    found = alternate(turns, settings.rounds)
    report = Report(
        f"A step of {settings.sessions} sessions, one row each; ms, median (quartiles)",
        ["side", "step", "model", "over 1 rank, 1 thread", "busy processors (rank 0's process)"],
    )
    first, *_ = found
    base = [turn["step"] for turn in found[first]]
    for name, turned in found.items():
        spreads = {
            key: Spread.of([turn[key] * 1000 for turn in turned]) for key in ("step", "model")
        }
        over = ratios([turn["step"] for turn in turned], base)
        busy = Spread.of([turn["processors"] for turn in turned])
        report.rows.append([name, spreads["step"], spreads["model"], over, busy])
        report.figures[name] = {
            "step_ms": spreads["step"].median,
            "model_ms": spreads["model"].median,
            "ratio": over.median,
            "processors": busy.median,
        }
    split = found[sides.split_name]
    parts = parts_of(split)
    for name, seconds in parts.items():
        spread = Spread.of([value * 1000 for value in seconds])
        report.rows.append([f"  of it: {name}", spread, "", "", ""])
        report.figures[name] = {"ms": spread.median}
    counts = Spread.of([turn["collectives"] for turn in split])
    report.rows.append(["  collectives", counts, "", "", ""])
    decode = Spread.of([turn["decode"] * 1e6 for turn in split])
    report.rows.append(["  decode by another rank (rank 0 waits for it), us", decode, "", "", ""])
    report.figures["decode"] = {"ms": decode.median / 1000}
    whole = Spread.of([turn["step"] for turn in split]).median
    total = sum(Spread.of(seconds).median for seconds in parts.values())
    said = f"medians of the parts make {total / whole:.1%} of a step's"
    report.bars.append(Bar("parts make a step within 5 %", abs(total / whole - 1) < 0.05, said))
    size = Spread.of([turn["bytes"] for turn in split])
    report.rows.append(["  bytes of a message", size, "", "", ""])
    report.figures["message_bytes"] = size.median
    control = [turn["encode"] + turn["send"] + turn["decode"] for turn in split]
    control_s = Spread.of(control).median
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
        # At once, not after minutes.
        compare_ranks = ranks_to_compare(path, settings.compare_ranks)
        settings = replace(settings, compare_ranks=compare_ranks)
        # The embedded model has nine heads, which two ranks can't share: a like one has eight.
        even = settings.model != TINY and not packed
        if not even:
            ranks_to_compare(path, settings.ranks)
        loading = memory_report(path, (1, 2, 4) if path.endswith(TINY) else (1, 3))
        loading.show()
        progress("comparing tokens")
        with ExitStack() as stack_of_compared:
            compared = compare(path, settings, stack_of_compared)
        progress("taking turns")
        if even:
            path = with_even_heads(path, where / "even")
        sides = Sides(path, settings, stack)
        report = step_report(settings, sides)
        split, _ = sides.engines[sides.split_name]
        rows = rows_report(
            split.model, sides.spent, sessions=settings.sessions, rounds=settings.rounds
        )
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
    report.bars += [*beside.bars, *loading.bars]
    report.print()
    report.exit(enforce=settings.bar)
