"""From the moment at which clients leave until the workers hold nothing of their sessions.

Streams begin together. Once each has its first token and both workers hold all of the sessions,
all of them end at the same moment, and each worker is asked again and again what it holds. The
ways to end take turns.
"""

import asyncio
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from types import MappingProxyType

import grpc

from bench.cluster import Cluster, Size
from bench.paced_worker import paced
from bench.report import Bar, Report, progress
from bench.rounds import Spread
from bench.tiny import write_model
from bench.workers import Holdings, ask
from outrider import rpc
from outrider.cli.models import resolve_model
from outrider.client import AsyncClient
from outrider.config import CACHE, setting
from outrider.errors import UnavailableError
from outrider.local.commands import StackSettings
from outrider.model.embedded import EMBEDDED_MODEL
from outrider.pb.v1 import coordinator_pb2 as pb
from outrider.pb.v1 import coordinator_pb2_grpc

TINY, LETTERS = "tiny", 24
# Longest time that is waited for workers to begin, or to hold nothing.
PATIENCE_S = 60.0
POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class Settings:
    """How many streams are cut, and under what."""

    model: str = setting(EMBEDDED_MODEL, help="The target: a path, this name, or `tiny`.")
    streams: int = setting(500, at_least=1, help="Streams that are cut, all together.")
    at_once: int = setting(20, at_least=1, help="Streams that are cut at the same moment.")
    prompt_tokens: int = setting(16, at_least=1, help="Tokens of a prompt.")
    new_tokens: int = setting(200, at_least=8, help="Tokens that a stream would have.")
    pace_s: float = setting(0.0, at_least=0, help="Least seconds of a step, for tiny models.")
    cache: str = setting(CACHE, help="Directory for the embedded model.")
    bar: bool = setting(False, help="Exit with 1 when a worker takes longer than --most-s.")
    most_s: float = setting(2.0, at_least=0, help="The bar: the longest time, in seconds.")


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """A running completion on a connection of its own."""

    channel: grpc.aio.Channel
    stub: "coordinator_pb2_grpc.CoordinatorServiceAsyncStub"
    call: "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]"
    session_id: str

    async def cut(self) -> None:
        """Give the call up, as a client does that leaves its loop."""
        self.call.cancel()

    async def cancel(self) -> None:
        """Ask for the end by the session's id."""
        await self.stub.Cancel(pb.CancelRequest(session_id=self.session_id))

    async def close(self) -> None:
        """Close the connection under the call."""
        await self.channel.close(None)


WAYS: Mapping[str, Callable[[Stream], Awaitable[None]]] = MappingProxyType(
    {"call given up": Stream.cut, "Cancel": Stream.cancel, "connection closed": Stream.close}
)


async def begin(address: str, request: pb.GenerateRequest) -> Stream:
    """Start a completion and read it up to its first token; again where that was refused.

    Raises:
        UnavailableError: it was refused for `PATIENCE_S`.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        channel = rpc.open_channel(address)
        try:
            return await _first_token(channel, request)
        except grpc.aio.AioRpcError as error:
            await channel.close(None)
            if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > deadline:
                raise UnavailableError(f"a stream did not begin: {error.details()}") from error
            await asyncio.sleep(0.1)


async def _first_token(channel: grpc.aio.Channel, request: pb.GenerateRequest) -> Stream:
    stub: coordinator_pb2_grpc.CoordinatorServiceAsyncStub
    stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
    call = stub.Generate(request)
    session_id = ""
    async for response in call:
        session_id = response.started.session_id or session_id
        if response.WhichOneof("event") == "delta":
            return Stream(channel, stub, call, session_id)
    raise UnavailableError("a stream ended before its first token")


class Trial:
    """Cuts streams and times the workers; `seconds` of each way and worker has one a wave."""

    def __init__(self, cluster: Cluster, settings: Settings, vocabulary: int) -> None:
        self.seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.streams = 0
        self._address = cluster.addresses[0]
        self._settings = settings
        self._vocabulary = vocabulary
        self._chance = random.Random(0)

    async def run(self) -> None:
        """Cut all of them."""
        async with AsyncExitStack() as exit_stack:
            async with AsyncClient(self._address) as client:
                workers = (await client.status()).workers
            pools = {
                worker.pool: await exit_stack.enter_async_context(rpc.open_channel(worker.address))
                for worker in workers
            }
            for way in cycle(WAYS):
                if self.streams >= self._settings.streams:
                    return
                at_once = min(self._settings.at_once, self._settings.streams - self.streams)
                await self._wave(way, at_once, pools)
                self.streams += at_once

    async def _wave(self, way: str, at_once: int, pools: Mapping[str, grpc.aio.Channel]) -> None:
        beginning = (begin(self._address, self._request()) for _ in range(at_once))
        streams = await asyncio.gather(*beginning)
        for pool, channel in pools.items():
            await _until(pool, channel, lambda held: held.sessions == at_once)
        since = time.monotonic()
        ending = asyncio.gather(*(WAYS[way](stream) for stream in streams))
        gone = [_until(pool, channel, lambda held: held.idle) for pool, channel in pools.items()]
        for pool, moment in zip(pools, await asyncio.gather(*gone), strict=True):
            self.seconds[way, pool].append(moment - since)
        await ending
        for stream in streams:
            await stream.channel.close(None)
        said = ", ".join(f"{pool} {self.seconds[way, pool][-1]:.3f} s" for pool in pools)
        progress(f"{at_once} streams: {way}: {said}")

    def _request(self) -> pb.GenerateRequest:
        settings = self._settings
        request = pb.GenerateRequest(max_tokens=settings.new_tokens, ignore_eos=True)
        request.token_ids.ids.extend(
            self._chance.randrange(self._vocabulary) for _ in range(settings.prompt_tokens)
        )
        return request


async def _until(
    pool: str, channel: grpc.aio.Channel, condition: Callable[[Holdings], bool]
) -> float:
    """The moment at which a worker says so.

    Raises:
        UnavailableError: it does not, however long one waits.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not condition(held := await ask(pool, channel)):
        if time.monotonic() > deadline:
            raise UnavailableError(f"worker {held.worker_id} still has {held.sessions} sessions")
        await asyncio.sleep(POLL_S)
    return time.monotonic()


async def measure(settings: Settings, model: str, vocabulary: int) -> Trial:
    """The whole run."""
    stack = StackSettings(
        model=model, drafter="ngram", verify_flags=("--max-sessions", str(settings.at_once))
    )
    size = Size(coordinators=1, verify_workers=1, draft_workers=1)
    stand_ins = paced(("verify-1",), settings.pace_s)
    async with Cluster(stack, size=size, stand_ins=stand_ins, report=progress) as cluster:
        trial = Trial(cluster, settings, vocabulary)
        await trial.run()
    return trial


def report_of(settings: Settings, trial: Trial) -> Report:
    """Of each way and worker the median and the longest time of a wave."""
    columns = ["ended by", "worker", "waves", "median (quartiles), s", "worst, s"]
    report = Report("Until the workers hold nothing", columns)
    for (way, pool), seconds in trial.seconds.items():
        spread = Spread.of(seconds)
        report.rows.append([way, pool, spread.count, spread, max(seconds)])
        report.figures[f"{way}, {pool}"] = {"median_s": spread.median, "all": seconds}
    report.figures["streams"] = trial.streams
    worst = max(max(seconds) for seconds in trial.seconds.values())
    met = worst <= settings.most_s
    report.bars = [Bar(f"at most {settings.most_s:g} s, always", met, f"worst {worst:.3g} s")]
    return report


def run(settings: Settings) -> None:
    """Time from the end of many streams until the workers hold nothing of them."""
    with tempfile.TemporaryDirectory(prefix="outrider-cancel-") as directory:
        if settings.model == TINY:
            model, vocabulary = str(write_model(Path(directory), letters=LETTERS)), LETTERS
        else:
            model, vocabulary = resolve_model(settings.model, settings.cache), 20_000
        trial = asyncio.run(measure(settings, model, vocabulary))
    report = report_of(settings, trial)
    report.print()
    report.exit(enforce=settings.bar)
