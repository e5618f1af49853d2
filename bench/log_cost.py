"""Tokens per second with the token log and without, and with a Redis that is far away.

One verify worker and three coordinators: one logs, one does not, and one logs to a Redis that
answers it late. The same requests go over them in turn, round by round.
"""

import asyncio
import random
import tempfile
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.cluster import VALKEY, Cluster, Size
from bench.paced_worker import paced
from bench.report import Bar, Report, progress
from bench.rounds import Spread, ratios
from bench.tiny import write_model
from outrider.cli.models import resolve_model
from outrider.client import AsyncClient
from outrider.config import CACHE, setting
from outrider.local.commands import StackSettings
from outrider.model.embedded import EMBEDDED_MODEL

TINY, LETTERS = "tiny", 24
WITH, FAR, WITHOUT = "log", "log, Redis far away", "no log"


@dataclass(frozen=True, slots=True)
class Settings:
    """What to time."""

    model: str = setting(EMBEDDED_MODEL, help="The target: a path, this name, or `tiny`.")
    sessions: int = setting(16, at_least=1, help="Sessions at once.")
    new_tokens: int = setting(64, at_least=1, help="Tokens of a completion.")
    prompt_tokens: int = setting(32, at_least=1, help="Tokens of a prompt.")
    rounds: int = setting(9, at_least=1, help="Rounds, each with every side.")
    threads: int = setting(
        0, at_least=0, help="Threads of the verify worker; 0 takes all cores from the others."
    )
    pace_s: float = setting(0.0, at_least=0, help="Least seconds of a step, for tiny models.")
    far_s: float = setting(0.005, at_least=0, help="One way to the Redis that is far away.")
    cache: str = setting(CACHE, help="Directory for the embedded model.")
    bar: bool = setting(False, help="Exit with 1 when the log costs more than 2 %.")


async def rate(client: AsyncClient, settings: Settings, vocabulary: int, number: int) -> float:
    """Tokens per second of all sessions of round `number` together."""

    async def one(session: int) -> int:
        chance = random.Random(number * 1000 + session)
        completion = await client.complete(
            token_ids=[chance.randrange(vocabulary) for _ in range(settings.prompt_tokens)],
            max_tokens=settings.new_tokens,
            temperature=0.8,
            seed=session,
            ignore_eos=True,
            speculation=False,
        )
        return len(completion.pieces)

    started = time.perf_counter()
    tokens = await asyncio.gather(*(one(session) for session in range(settings.sessions)))
    return sum(tokens) / (time.perf_counter() - started)


async def measure(settings: Settings, model: str, vocabulary: int) -> dict[str, list[float]]:
    """Tokens per second of each side, by round; a round more comes first and does not count."""
    stack = StackSettings(
        model=model,
        drafter="ngram",
        threads=settings.threads,
        verify_flags=("--max-sessions", str(settings.sessions), "--no-prefix-cache"),
    )
    size = Size(coordinators=3, verify_workers=1, draft_workers=0)
    stand_ins = {
        **paced(("verify-1",), settings.pace_s),
        "coordinator-2": ("bench.unlogged_coordinator",),
    }
    rates: dict[str, list[float]] = defaultdict(list)
    async with AsyncExitStack() as exit_stack:
        cluster = Cluster(
            stack,
            size=size,
            stand_ins=stand_ins,
            beside_redis=("coordinator-1", "coordinator-2", "verify-1"),
            report=progress,
        )
        await exit_stack.enter_async_context(cluster)
        logging, unlogged, logging_far = [
            await exit_stack.enter_async_context(AsyncClient(address))
            for address in cluster.addresses
        ]
        cluster.links[f"coordinator-3>{VALKEY}"].delay_s = settings.far_s
        sides = [(WITH, logging), (WITHOUT, unlogged), (FAR, logging_far)]
        for number in range(-1, settings.rounds):
            for side, client in sides if number % 2 == 0 else sides[::-1]:
                found = await rate(client, settings, vocabulary, number)
                progress(f"round {number + 1} of {settings.rounds}: {side}: {found:.1f} tokens/s")
                if number >= 0:
                    rates[side].append(found)
    return rates


def report_of(rates: dict[str, list[float]]) -> Report:
    """The table; the bar is the ratio within rounds."""
    report = Report("Cost of the token log", ["side", "tokens/s", "over no log"])
    for side in (WITH, FAR, WITHOUT):
        over = ratios(rates[side], rates[WITHOUT])
        report.rows.append([side, Spread.of(rates[side]), over])
        report.figures[side] = {
            "tokens_per_s": Spread.of(rates[side]).median,
            "over_no_log": over.median,
            "all": rates[side],
        }
    cost = 1.0 - ratios(rates[WITH], rates[WITHOUT]).median
    report.bars = [Bar("the log costs at most 2 % of the tokens per second", cost <= 0.02)]
    return report


def run(settings: Settings) -> None:
    """Tokens per second with the token log and without it, in one run."""
    with tempfile.TemporaryDirectory(prefix="outrider-log-cost-") as directory:
        if settings.model == TINY:
            model, vocabulary = str(write_model(Path(directory), letters=LETTERS)), LETTERS
        else:
            model, vocabulary = resolve_model(settings.model, settings.cache), 20_000
        report = report_of(asyncio.run(measure(settings, model, vocabulary)))
    report.print()
    report.exit(enforce=settings.bar)
