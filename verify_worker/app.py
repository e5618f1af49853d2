"""A verify worker from start to stop."""

import asyncio
import gc
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from outrider import logs, rpc, service
from outrider.callers import COORDINATOR_NAME
from outrider.errors import ConfigError, InternalError, RankLostError
from outrider.model.parallel.leader import ParallelModel
from outrider.pb.v1 import verify_pb2, verify_pb2_grpc
from outrider.session.announcing import Announcer
from outrider.session.prefixes import Holder, PrefixDirectory, keep_published
from outrider.session.redis import Redis, connect
from outrider.session.registry import Pool, Registry, WorkerRecord
from outrider.tls import TlsFiles
from verify_worker import metrics
from verify_worker.abandoning import in_thread
from verify_worker.config import Settings
from verify_worker.draft_links import DraftLinks
from verify_worker.engine import Engine
from verify_worker.health import heartbeat, keep_health
from verify_worker.leading import Ranks
from verify_worker.scheduler import Scheduler
from verify_worker.servicer import Identity, VerifyServicer
from verify_worker.state import Output
from verify_worker.streams import Streams, deliver
from verify_worker.target import Target, load_target
from verify_worker.tracing import SessionSpans

T = TypeVar("T")
SERVICE_NAME = verify_pb2.DESCRIPTOR.services_by_name["VerifyService"].full_name
_STREAM_GRACE_S = 2.0
# What loading may take to end by itself where it is not wanted any more.
_LOADING_GRACE_S = 5.0
# What the last step may take after everything else has ended.
_STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class _Here:
    """Where the worker listens, for as long as it runs."""

    server: rpc.Server
    address: str
    tls: TlsFiles | None


class VerifyWorker:
    """One worker: it loads the target, listens, announces itself, and drains at the end."""

    def __init__(self, settings: Settings, worker_id: str) -> None:
        self._settings = settings
        self._identity = Identity(worker_id, service.new_incarnation())
        self._servicer = VerifyServicer(worker_id)
        self._stopping = False
        self._scheduler: Scheduler | None = None
        self._log = logs.get(__name__)

    async def run(self, stop: asyncio.Event) -> None:
        """Verify until `stop`; it listens at once, and is healthy while it takes new sessions.

        Raises:
            ConfigError: a setting is wrong, or the model can't be used.
            AddressInUseError: the port is taken.
            InternalError: the engine failed.
            RankLostError: the ranks of a split target did not start.
            Abandoned: it was stopped while it loaded, and loading goes on.
        """
        settings = self._settings
        # Before the model, which may take minutes.
        tls = settings.open_tls(settings.draft_worker_name)
        server = rpc.Server(tls=tls, checks=settings.peer_checks(COORDINATOR_NAME))
        verify_pb2_grpc.add_VerifyServiceServicer_to_server(self._servicer, server.grpc)
        port = await server.start(SERVICE_NAME, settings.host, settings.port)
        address = rpc.address_of(settings.advertise_host or settings.host, port)
        self._log.info("listening", address=address)
        here = _Here(server, address, tls)
        try:
            if settings.tensor_parallel_size == 1:
                target = await self._load(stop, None)
                if target is not None:
                    await self._serve(target, here, stop)
                return
            ranks = await self._open_ranks(stop)
            if ranks is None:
                return
            _take_signals_back()
            try:
                while not stop.is_set():
                    await self._serve_with(ranks, here, stop)
            finally:
                await asyncio.to_thread(ranks.close)
        finally:
            await server.stop(_STREAM_GRACE_S)

    async def _serve_with(self, ranks: Ranks, here: _Here, stop: asyncio.Event) -> None:
        """Serve until `stop`, or until a rank is lost; then all others have ended too."""
        try:
            target = await self._load(stop, ranks)
            if target is None:
                return
            try:
                await self._serve(target, here, stop)
            except RankLostError as error:
                why = await asyncio.to_thread(ranks.loss)
                self._log.error("the ranks start anew", error=error.message, cause=why)
                # Whoever knew the worker before must not take it for the same.
                incarnation = service.new_incarnation()
                self._identity = Identity(self._identity.worker_id, incarnation)
                self._stopping = False
                # New ranks that never come are the end of the process, in time.
                await here.server.set_alive(True)
            else:
                await asyncio.to_thread(_let_end, target)
        finally:
            await asyncio.to_thread(ranks.clear)

    async def _open_ranks(self, stop: asyncio.Event) -> Ranks | None:
        """Ray; None if `stop` came before it. Raises as `_unless_stopped`."""
        # What Ray starts would end with the thread that has started it.
        opening = in_thread(lambda: open_ranks(self._settings), stays=True)
        ranks = await self._unless_stopped(opening, stop)
        if ranks is not None and stop.is_set():
            await asyncio.to_thread(ranks.close)
            return None
        return ranks

    async def _load(self, stop: asyncio.Event, ranks: Ranks | None) -> Target | None:
        """The loaded target; None if `stop` came before it. Raises as `_unless_stopped`."""

        def load() -> Target:
            _release_memory()
            return load_target(self._settings, ranks)

        # What waits for ranks has an end, too, once they have ended.
        hurry = None if ranks is None else ranks.clear
        target = await self._unless_stopped(in_thread(load), stop, hurry)
        return None if stop.is_set() else target

    async def _unless_stopped(
        self,
        loading: asyncio.Future[T],
        stop: asyncio.Event,
        hurry: Callable[[], None] | None = None,
    ) -> T | None:
        """What loading gives; it gets little time when `stop` comes, and may give nothing then.

        Raises:
            Abandoned: it goes on for long after `stop`.
        """
        stopped = asyncio.create_task(stop.wait())
        waiting: set[asyncio.Future[Any]] = {loading, stopped}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            stopped.cancel()
            return loading.result()
        self._log.info("stopped while loading")
        if hurry is not None:
            await asyncio.to_thread(hurry)
        await asyncio.wait({loading}, timeout=_LOADING_GRACE_S)
        if not loading.done():
            loading.cancel()
            raise service.Abandoned
        # There is no one left to tell of a fault.
        return loading.result() if loading.exception() is None else None

    async def _serve(self, target: Target, here: _Here, stop: asyncio.Event) -> None:
        settings, server = self._settings, here.server
        loop = asyncio.get_running_loop()

        def publish(outputs: Sequence[Output]) -> None:
            loop.call_soon_threadsafe(deliver, outputs, streams, links)

        ranks = target.model if isinstance(target.model, ParallelModel) else None
        engine = Engine(target.scheduler, target.runner, publish, SessionSpans(), ranks=ranks)
        streams = Streams(lambda: heartbeat(engine, self._identity))
        links = DraftLinks(engine.post, here.tls)
        self._export_metrics(target.scheduler)
        async with connect(
            settings.redis_url,
            password_file=settings.redis_password_file,
            tls=settings.redis_tls(),
        ) as redis:
            engine.start()
            self._servicer.serve_with(self._identity, engine, streams)
            leaving = asyncio.Event()
            announcer = Announcer(
                Registry(redis), lambda: self._record(target, here.address), self._obey
            )
            announcing = asyncio.create_task(announcer.run(leaving))
            publisher = asyncio.create_task(self._publish_prefixes(redis, target, leaving))
            health = asyncio.create_task(
                keep_health(server, engine, self._identity, settings.engine_silence_s)
            )
            self._log.info("serving", address=here.address, model=target.name)
            died = asyncio.wrap_future(engine.finished)
            stopped = asyncio.create_task(stop.wait())
            try:
                # Nobody would find a worker that is no longer announced.
                waiting: set[asyncio.Future[Any]] = {stopped, died, announcing}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            finally:
                stopped.cancel()
                # First nobody new comes, and all coordinators are told; then the sessions move
                # or finish, then the worker leaves the registry, then the parts end.
                self._identity.draining = self._stopping = True
                await server.set_serving(False)
                announcer.changed()
                await self._drain(engine, died)
                leaving.set()
                await announcing
                await publisher
                await self._servicer.leave(_STREAM_GRACE_S)
                await links.close()
                health.cancel()
                await asyncio.gather(health, return_exceptions=True)
                ended = await asyncio.to_thread(engine.stop, _STOP_S)
            if not ended:
                raise InternalError(f"the engine hangs: no end of a step within {_STOP_S:g} s")
            if died.done() and isinstance(fault := died.exception(), RankLostError):
                raise RankLostError(fault.message)  # without what it holds on to
            if died.done() and died.exception() is not None:
                raise InternalError("the engine failed; the log has the traceback")

    def _export_metrics(self, scheduler: Scheduler) -> None:
        """Have the metrics read this scheduler, from now on."""
        first = self._scheduler is None
        self._scheduler = scheduler
        if first:
            metrics.export(lambda: self._scheduler or scheduler, self._settings.max_draft_len)

    async def _publish_prefixes(self, redis: Redis, target: Target, stop: asyncio.Event) -> None:
        """Tell coordinators what new sessions can go on from here, until `stop`."""
        fingerprint = target.scheduler.prefixes.fingerprint
        if fingerprint:
            holder = Holder(self._identity.worker_id, self._identity.incarnation)
            depths = target.scheduler.pool.depths
            await keep_published(PrefixDirectory(redis), fingerprint, holder, depths, stop)

    async def _obey(self, draining: bool) -> None:
        """Give up the sessions or take some again, as somebody has ordered."""
        if not self._stopping:
            self._log.info("draining" if draining else "serving again")
            self._identity.draining = draining

    async def _drain(self, engine: Engine, died: asyncio.Future[None]) -> None:
        """Wait for the sessions to finish, for as long as the settings allow."""
        drained = asyncio.wrap_future(engine.drained())
        await asyncio.wait(
            {drained, died},
            timeout=self._settings.drain_timeout_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not drained.done():
            left = len(engine.scheduler.sessions)
            self._log.warning("sessions are left behind", sessions=left)

    def _record(self, target: Target, address: str) -> WorkerRecord:
        return WorkerRecord(
            pool=Pool.VERIFY,
            worker_id=self._identity.worker_id,
            address=address,
            incarnation=self._identity.incarnation,
            model=target.name,
            model_fingerprint=target.fingerprint,
            tokenizer_fingerprint=target.tokenizer_fingerprint,
            capacity=self._settings.max_sessions,
            weight=target.weight,
            sessions=len(target.scheduler.sessions),
            draining=self._identity.draining,
            context_len=target.context_len,
            kv_fingerprint=target.scheduler.prefixes.fingerprint,
            dtype=target.dtype,
            numerics=target.numerics,
            group=self._settings.group,
        )


def open_ranks(settings: Settings) -> Ranks:
    """A Ray with room for the ranks of a split target.

    Raises:
        ConfigError: Ray is not installed, or there is none.
    """
    try:
        # Not at the top: one rank needs no Ray, and importing it takes long.
        from verify_worker.ray_group import Cluster, RayRanks
    except ImportError as error:
        raise ConfigError(
            f"--tensor-parallel-size {settings.tensor_parallel_size} needs Ray ({error}): "
            "install outrider[ray]"
        ) from error
    size = settings.tensor_parallel_size
    # Nobody else is on a Ray of our own.
    shared = 1 if settings.ray_address else max(1, (os.cpu_count() or 1) // size)
    return RayRanks.connect(
        Cluster(
            size=size,
            address=settings.ray_address,
            strategy=settings.ray_strategy,
            cuda=settings.device.startswith("cuda"),
            cpus=settings.threads or shared,
            start_s=settings.rank_start_s,
        )
    )


def _release_memory() -> None:
    """Let go of weights and pages before, which must not be there beside the new ones."""
    gc.collect()
    # Else torch keeps their memory, which counts as used. Does nothing where CUDA is not in use.
    torch.cuda.empty_cache()


def _take_signals_back() -> None:
    """Have the handlers of this process again, in whose place Ray puts some of its own."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.getsignal(number))


def _let_end(target: Target) -> None:
    """Tell the ranks of a split target that this was all."""
    if isinstance(target.model, ParallelModel):
        with suppress(RankLostError):
            target.model.stop()
