"""From the end of a process to the next token of the sessions that it had.

Streams run without pause over two coordinators and two verify workers, while one process after
the other is killed and started again. Of every stream that the process carried, the time from the
kill to the next token that its client gets counts; for a verify worker that hangs (SIGSTOP)
likewise. At the end Valkey is down for a while: streams that run must not notice, and their logs
must be whole afterwards.
"""

import asyncio
import math
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path

from bench.cluster import VALKEY, Cluster, Size
from bench.paced_worker import paced
from bench.report import Bar, Report, progress
from bench.rounds import Spread
from bench.tiny import write_model
from outrider.cli.models import resolve_model
from outrider.client import AsyncClient, AsyncGeneration, GenerateOptions, Retry
from outrider.config import CACHE, setting
from outrider.errors import OutriderError, RecordsUnavailableError
from outrider.local.commands import StackSettings
from outrider.model.embedded import EMBEDDED_MODEL
from outrider.session.records import SessionRecords, SessionState
from outrider.session.redis import Redis, connect

TINY = "tiny"
LETTERS = 24
RETRY = Retry(start_s=60.0, resume_s=60.0)
VERIFY, COORDINATOR, HANG = "verify worker killed", "coordinator killed", "verify worker hung"
# Longest time that is waited for the next token.
PATIENCE_S = 60.0
# From Valkey's first answer, or the end of a stream, to its whole log: what is waited, the bar.
CATCH_UP_PATIENCE_S = 60.0
CATCH_UP_MOST_S = 10.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What is killed, how often, and under what."""

    model: str = setting(EMBEDDED_MODEL, help="The target: a path, this name, or `tiny`.")
    kills: int = setting(20, at_least=0, help="Kills of a verify worker, and of a coordinator.")
    hangs: int = setting(3, at_least=0, help="Verify workers that are stopped instead.")
    redis_down_s: float = setting(20.0, at_least=0, help="Seconds without Valkey; 0 leaves it up.")
    sessions: int = setting(8, at_least=1, help="Streams at once.")
    prompt_tokens: int = setting(64, at_least=1, help="Tokens of a prompt.")
    new_tokens: int = setting(160, at_least=8, help="Tokens of a completion.")
    pace_s: float = setting(0.0, at_least=0, help="Least seconds of a step, for tiny models.")
    cache: str = setting(CACHE, help="Directory for the embedded model.")
    bar: bool = setting(False, help="Exit with 1 when a median is above --most-s or a stream ends.")
    most_s: float = setting(3.0, at_least=0, help="The bar: the median after a kill, in seconds.")


@dataclass(slots=True, eq=False)
class Stream:
    """One running completion, and when its tokens came, on the monotonic clock."""

    generation: AsyncGeneration
    times: list[float] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


def next_token_s(times: Sequence[float], since: float) -> float | None:
    """Seconds from `since` to the first token that was not on its way then; None if none came.

    Tokens that were under way come at once, so it is the end of the longest gap that counts.
    """
    before = [moment for moment in times if moment <= since]
    after = [moment for moment in times if moment > since]
    if not after:
        return None
    starts = [before[-1] if before else since, *after[:-1]]
    _, end = max(zip(starts, after, strict=True), key=lambda gap: gap[1] - gap[0])
    return end - since


class Streams:
    """Keeps `sessions` completions running; each client begins with another coordinator."""

    def __init__(self, cluster: Cluster, settings: Settings, vocabulary: int) -> None:
        self.running: set[Stream] = set()
        self.finished = 0
        self.failed: list[str] = []
        self.sessions = settings.sessions
        self._cluster = cluster
        self._settings = settings
        self._vocabulary = vocabulary
        self._numbers = count()

    async def run(self) -> None:
        """Until cancelled."""
        await asyncio.gather(*(self._one_after_another() for _ in range(self._settings.sessions)))

    async def _one_after_another(self) -> None:
        while True:
            number = next(self._numbers)
            addresses = self._cluster.addresses
            first = number % len(addresses)
            # A fresh client: an old one remembers who failed it.
            ordered = [*addresses[first:], *addresses[:first]]
            async with AsyncClient(ordered, retry=RETRY) as client:
                await self._one(client, number)

    async def _one(self, client: AsyncClient, number: int) -> None:
        chance = random.Random(number)
        stream = Stream(client.generate(**self._options(chance, number)))
        self.running.add(stream)
        try:
            async for _ in stream.generation:
                stream.times.append(time.monotonic())
            self.finished += 1
        except OutriderError as error:
            self.failed.append(error.message)
        finally:
            self.running.discard(stream)
            stream.ended.set()

    def _options(self, chance: random.Random, number: int) -> GenerateOptions:
        settings = self._settings
        # Of different lengths, so that they do not all end together.
        new_tokens = chance.randint(settings.new_tokens // 2, settings.new_tokens)
        prompt = [chance.randrange(self._vocabulary) for _ in range(settings.prompt_tokens)]
        return GenerateOptions(
            token_ids=prompt,
            max_tokens=new_tokens,
            temperature=0.8,
            seed=number,
            ignore_eos=True,
        )


async def _answering(redis: Redis) -> None:
    """Wait until Valkey has loaded its data."""
    while True:
        try:
            return await redis.ping()
        except RecordsUnavailableError:
            await asyncio.sleep(0.1)


class Trial:
    """Breaks one process at a time and times what follows."""

    def __init__(self, cluster: Cluster, streams: Streams) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        # While Valkey was down: of each stream, its longest time without a token.
        self.redis_gaps_s: list[float] = []
        self.reconnects = 0
        # Of each of these streams, seconds until its log was whole; infinite if it never was.
        self.catch_up_s: list[float] = []
        self._cluster = cluster
        self._streams = streams

    async def verify_worker(self, number: int, *, hangs: bool) -> None:
        """Kill or stop a verify worker."""
        name = self._cluster.verify_workers[number % 2]
        victims = await self._on(name)
        since = time.monotonic()
        if hangs:
            self._cluster.pause(name)
        else:
            await self._cluster.kill(name)
        await self._time(HANG if hangs else VERIFY, victims, since)
        if hangs:
            self._cluster.go_on(name)
        else:
            await self._cluster.start_process(name)
        await self._cluster.ready()

    async def coordinator(self, number: int) -> None:
        """Kill a coordinator; its streams are those that go elsewhere."""
        name = self._cluster.coordinators[number % 2]
        before = {s: s.generation.reconnects for s in await self._all_busy()}
        since = time.monotonic()
        await self._cluster.kill(name)
        await asyncio.sleep(0.5)
        victims = [s for s, had in before.items() if s.generation.reconnects > had]
        await self._time(COORDINATOR, victims, since)
        await self._cluster.start_process(name)
        await self._cluster.ready()

    async def redis(self, seconds: float) -> None:
        """Take Valkey away, with its data, and look at the logs when it is back."""
        streams = await self._all_busy()
        reconnects = sum(stream.generation.reconnects for stream in streams)
        since = time.monotonic()
        await self._cluster.kill(VALKEY)
        await asyncio.sleep(seconds)
        until = time.monotonic()
        await self._cluster.start_process(VALKEY)
        await self._cluster.ready()
        for stream in streams:
            times = [since, *(t for t in stream.times if since < t < until)]
            if stream in self._streams.running or stream.times[-1] >= until:
                times.append(until)
            self.redis_gaps_s.append(max((b - a for a, b in pairwise(times)), default=0.0))
        self.reconnects = sum(s.generation.reconnects for s in streams) - reconnects
        async with connect(self._cluster.redis_url) as redis:
            await _answering(redis)
            caught_up = (self._catch_up_s(SessionRecords(redis), stream) for stream in streams)
            self.catch_up_s = await asyncio.gather(*caught_up)

    async def _catch_up_s(self, records: SessionRecords, stream: Stream) -> float:
        """Seconds until the log says what the client got, from now or from the stream's end."""
        since = time.monotonic()
        if not stream.ended.is_set():
            await stream.ended.wait()
            since = time.monotonic()
        completion = await stream.generation.complete()
        while (waited := time.monotonic() - since) < CATCH_UP_PATIENCE_S:
            record, logged = await records.read(stream.generation.session_id)
            same = tuple(logged[record.prompt_len :]) == completion.token_ids
            if same and record.state is SessionState.FINISHED:
                return waited
            await asyncio.sleep(0.05)
        return math.inf

    def _busy(self) -> list[Stream]:
        """Those in the midst of their tokens."""
        return [stream for stream in self._streams.running if len(stream.times) >= 2]

    async def _all_busy(self) -> list[Stream]:
        """All of them, once each has begun to say something."""
        while True:
            busy = self._busy()
            if len(busy) == self._streams.sessions:
                return busy
            await asyncio.sleep(0.05)

    async def _on(self, name: str) -> list[Stream]:
        """The streams whose session is on a verify worker; waits until there is one."""
        async with AsyncClient(self._cluster.addresses) as client:
            while True:
                found = []
                for stream in self._busy():
                    with suppress(OutriderError):  # such as its end
                        info = await client.get_session(stream.generation.session_id)
                        if info.verify_worker_id == name:
                            found.append(stream)
                if found:
                    return found
                await asyncio.sleep(0.05)

    async def _time(self, what: str, victims: Sequence[Stream], since: float) -> None:
        """Wait for the next token of each, and note the median and how many there were."""
        deadline = since + PATIENCE_S
        # One that had ended before anything happened tells nothing.
        while time.monotonic() < deadline:
            waiting = [s for s in victims if s in self._streams.running and not _went_on(s, since)]
            if not waiting:
                break
            await asyncio.sleep(0.02)
        # A token that was on its way may have hidden the gap: let a few more come.
        await asyncio.sleep(1.0)
        found = [next_token_s(stream.times, since) for stream in victims]
        seconds = [value for value in found if value is not None]
        if seconds:
            self.seconds[what].append(statistics.median(seconds))
            progress(f"{what}: {', '.join(f'{value:.2f}' for value in sorted(seconds))} s")


def _went_on(stream: Stream, since: float) -> bool:
    """Whether several tokens have come after it, the last one well after it."""
    return sum(moment > since for moment in stream.times) >= 5 and stream.times[-1] > since + 0.3


async def measure(settings: Settings, model: str, vocabulary: int) -> tuple[Trial, Streams]:
    """The whole run."""
    stack = StackSettings(model=model, threads=1)
    stand_ins = paced(("verify-1", "verify-2"), settings.pace_s)
    cluster = Cluster(stack, size=Size(draft_workers=1), stand_ins=stand_ins, report=progress)
    async with cluster:
        streams = Streams(cluster, settings, vocabulary)
        trial = Trial(cluster, streams)
        running = asyncio.create_task(streams.run())
        try:
            for number in range(settings.kills):
                await trial.verify_worker(number, hangs=False)
                await trial.coordinator(number)
            for number in range(settings.hangs):
                await trial.verify_worker(number, hangs=True)
            if settings.redis_down_s:
                await trial.redis(settings.redis_down_s)
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
    return trial, streams


def report_of(settings: Settings, trial: Trial, streams: Streams) -> Report:
    """Medians over the kills of the median over a kill's sessions."""
    report = Report("To the next token", ["after", "times", "median (quartiles), s", "worst, s"])
    for what, seconds in trial.seconds.items():
        spread = Spread.of(seconds)
        report.rows.append([what, spread.count, spread, max(seconds)])
        report.figures[what] = {"times": len(seconds), "median_s": spread.median, "all": seconds}
    if trial.redis_gaps_s:
        what, gaps = f"longest gap in {settings.redis_down_s:g} s without Redis", trial.redis_gaps_s
        report.rows.append([what, len(gaps), Spread.of(gaps), max(gaps)])
        report.figures["redis_gaps_s"] = gaps
        report.bars.append(
            Bar(
                "no stream notices that Redis is gone",
                trial.reconnects == 0,
                f"{trial.reconnects} broke",
            )
        )
        late = trial.catch_up_s
        report.rows.append(["logs whole once Redis is back", len(late), Spread.of(late), max(late)])
        report.figures["catch_up_s"] = late
        what = f"logs are whole {CATCH_UP_MOST_S:g} s after Redis is back"
        report.bars.append(Bar(what, max(late) <= CATCH_UP_MOST_S))
    report.rows.append(["streams that ended well", streams.finished, "", ""])
    report.figures["finished"] = streams.finished
    for what in (VERIFY, COORDINATOR) if settings.kills else ():
        found = trial.seconds.get(what, [])
        met = bool(found) and statistics.median(found) <= settings.most_s
        report.bars.append(Bar(f"{what}: at most {settings.most_s:g} s in the median", met))
    report.bars.append(Bar("no stream failed", not streams.failed, "; ".join(streams.failed[:3])))
    return report


def run(settings: Settings) -> None:
    """Time from the kill of a process to the next token of the sessions that it had."""
    with tempfile.TemporaryDirectory(prefix="outrider-failover-") as directory:
        if settings.model == TINY:
            model, vocabulary = str(write_model(Path(directory), letters=LETTERS)), LETTERS
        else:
            model, vocabulary = resolve_model(settings.model, settings.cache), 20_000
        trial, streams = asyncio.run(measure(settings, model, vocabulary))
    report = report_of(settings, trial, streams)
    report.print()
    report.exit(enforce=settings.bar)
