"""A draft worker from start to stop."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from draft_worker import figures
from draft_worker.config import Settings
from draft_worker.drafters import ChosenDrafter, build
from draft_worker.engine import Engine
from draft_worker.health import Health
from draft_worker.servicer import DraftServicer
from outrider import logs, rpc, service
from outrider.callers import VERIFY_WORKER_NAME
from outrider.errors import InternalError
from outrider.pb.v1 import draft_pb2, draft_pb2_grpc
from outrider.session.announcing import Announcer
from outrider.session.redis import connect
from outrider.session.registry import Pool, Registry, WorkerRecord

T = TypeVar("T")
SERVICE_NAME = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name
# For the last frames of streams that have been ended.
STREAM_GRACE_S = 2.0


class DraftWorker:
    """One worker: a server that listens at once and an engine once the model is loaded.

    Made in the event loop that it runs in.
    """

    def __init__(self, settings: Settings, worker_id: str) -> None:
        self._settings = settings
        self._worker_id = worker_id
        self._incarnation = service.new_incarnation()
        self._server = rpc.Server(
            tls=settings.open_tls(), checks=settings.peer_checks(VERIFY_WORKER_NAME)
        )
        self._servicer = DraftServicer(worker_id, self._incarnation)
        self._announced = self._draining = self._stopping = False
        self._log = logs.get(__name__)

    @property
    def _welcome(self) -> bool:
        """Whether new sessions are, as far as it is up to this process."""
        return self._announced and not self._draining

    async def run(self, stop: asyncio.Event) -> None:
        """Draft until `stop`; healthy once it can draft and the registry names it.

        Raises:
            ConfigError: a setting is wrong, or the model can't be used.
            AddressInUseError: the port is taken.
            InternalError: the engine failed.
        """
        settings = self._settings
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self._servicer, self._server.grpc)
        async with connect(
            settings.redis_url,
            password_file=settings.redis_password_file,
            tls=settings.redis_tls(),
        ) as redis:
            port = await self._server.start(SERVICE_NAME, settings.host, settings.port)
            address = rpc.address_of(settings.advertise_host or settings.host, port)
            self._log.info("listening", address=address)
            try:
                # Loading can't be interrupted: a process that is stopped now ends after it.
                chosen = await _unless(stop, asyncio.to_thread(build, settings))
                if chosen is not None:
                    await self._draft(chosen, address, Registry(redis), stop)
            finally:
                await self._server.stop(STREAM_GRACE_S)

    async def _draft(
        self, chosen: ChosenDrafter, address: str, registry: Registry, stop: asyncio.Event
    ) -> None:
        """Draft with what was loaded until `stop` or until the engine dies."""
        engine = Engine(chosen.drafter, max_sessions=self._settings.max_sessions)
        figures.export(engine.figures)
        engine.start()
        self._servicer.serve_with(engine)
        silence_s = self._settings.engine_silence_s
        health = Health(self._server, engine, lambda: self._welcome, silence_s)
        keeping = asyncio.create_task(health.keep())
        ending = asyncio.Event()
        announcer = Announcer(
            registry,
            lambda: self._record(chosen, address, engine.figures.sessions),
            lambda draining: self._obey(engine, health, draining),
        )
        announcing = asyncio.create_task(
            self._announce(announcer, health, chosen.drafter.name, ending)
        )
        stopped = asyncio.create_task(stop.wait())
        died = asyncio.wrap_future(engine.finished)
        try:
            waiting: set[asyncio.Future[Any]] = {stopped, died, announcing}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # First nobody new comes, and all coordinators are told; then those who are here
            # leave, then the worker leaves the registry, then the engine ends.
            stopped.cancel()
            self._draining = self._stopping = True
            await health.tell()
            announcer.changed()
            await self._drain(engine, died)
            ending.set()
            self._servicer.end_streams()
            await self._server.stop(STREAM_GRACE_S)
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await asyncio.to_thread(engine.stop)
            await announcing
        if died.exception() is not None:
            raise InternalError("the engine failed; the log has the traceback")

    async def _announce(
        self, announcer: Announcer, health: Health, drafter: str, ending: asyncio.Event
    ) -> None:
        """Be healthy from the first announcement on, and stay announced until `ending`."""
        running = asyncio.create_task(announcer.run(ending))
        first = asyncio.create_task(announcer.announced.wait())
        await asyncio.wait({running, first}, return_when=asyncio.FIRST_COMPLETED)
        first.cancel()
        if announcer.announced.is_set() and not self._stopping:
            self._announced = True
            await health.tell()
            self._log.info("serving", drafter=drafter)
        await running

    async def _obey(self, engine: Engine, health: Health, draining: bool) -> None:
        """Open nothing from now on, or something again, as somebody has ordered."""
        if not self._stopping:
            self._log.info("draining" if draining else "serving again")
            self._draining = draining
            engine.refuse(draining)
            await health.tell()

    async def _drain(self, engine: Engine, died: asyncio.Future[None]) -> None:
        """Wait for the sessions to leave, for as long as the settings allow."""
        await asyncio.wait(
            {asyncio.wrap_future(engine.drain()), died},
            timeout=self._settings.drain_timeout_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if engine.figures.sessions:
            self._log.warning("sessions are left behind", sessions=engine.figures.sessions)

    def _record(self, chosen: ChosenDrafter, address: str, sessions: int) -> WorkerRecord:
        return WorkerRecord(
            pool=Pool.DRAFT,
            worker_id=self._worker_id,
            address=address,
            incarnation=self._incarnation,
            model=chosen.drafter.name,
            model_fingerprint=chosen.model_fingerprint,
            tokenizer_fingerprint=chosen.tokenizer_fingerprint,
            capacity=self._settings.max_sessions,
            sessions=sessions,
            draining=self._draining,
            context_len=chosen.context_len,
            group=self._settings.group,
        )


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None when `stop` is set before it is there."""
    working = asyncio.create_task(work)
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, stopped):
            task.cancel()
        await asyncio.gather(working, stopped, return_exceptions=True)
