"""The coordinator as a whole: what it starts, what it does twice a second, how it stops."""

import asyncio

from coordinator.access import Access
from coordinator.admission import Admission, AdmissionLimits
from coordinator.config import NONE, REQUIRE, Settings
from coordinator.draining import DrainOrders, move_sessions
from coordinator.figures import Figures
from coordinator.limits import CLIENT_MESSAGE_BYTES
from coordinator.log_writer import LogWriter
from coordinator.model import ServedModel, load_served_model
from coordinator.orphans import OrphanSweep
from coordinator.placement import Trust
from coordinator.pool import WorkerPool
from coordinator.prefixes import PrefixLookup
from coordinator.servicer import CoordinatorServicer
from coordinator.services import Services
from coordinator.sessions import Sessions
from coordinator.speculation import CurrentPolicy
from outrider import logs, rpc
from outrider.callers import CLIENT_NAME
from outrider.errors import RecordsUnavailableError
from outrider.pb.v1 import coordinator_pb2, coordinator_pb2_grpc
from outrider.session.policy import PolicyStore
from outrider.session.prefixes import PrefixDirectory
from outrider.session.records import Lifetimes, SessionRecords
from outrider.session.redis import Redis, connect
from outrider.session.registry import Registry
from outrider.tokens import TokenFiles

REFRESH_S = 0.5
# A Redis that hangs must not hold up running sessions for long.
REDIS_TIMEOUT_S = 1.0
GRACE_S = 1.0


class Coordinator:
    """A coordinator between `start` and `stop`, both called once, in this order."""

    def __init__(self, settings: Settings, model: ServedModel, redis: Redis) -> None:
        self._settings = settings
        registry = Registry(redis)
        tls = settings.open_tls(settings.verify_worker_name)
        self._pool = WorkerPool(
            registry,
            model=model.name,
            model_fingerprint=model.fingerprint,
            tokenizer_fingerprint=model.tokenizer.fingerprint,
            group=settings.group,
            trust=Trust(frozenset(settings.trust_draft_worker)),
            prefixes=PrefixLookup(PrefixDirectory(redis)),
            silence_s=settings.verify_silence_s,
            tls=tls,
        )
        self._policy = CurrentPolicy(PolicyStore(redis))
        lifetimes = Lifetimes(
            paused_s=settings.paused_ttl_s,
            finished_s=settings.finished_ttl_s,
            lease_s=settings.lease_s,
        )
        self._services = Services(
            self._pool,
            LogWriter(redis, lease_s=settings.lease_s),
            Figures(),
            settings.place_wait_s,
            settings.replace_wait_s,
        )
        records = SessionRecords(redis, lifetimes)
        self._orphans = OrphanSweep(redis, records.calls)
        self._sessions = Sessions(self._services, records, model, settings.worker_id)
        self._admission = Admission(
            AdmissionLimits(
                settings.max_sessions,
                settings.max_queued,
                settings.queue_wait_s,
                settings.tenant_sessions,
            ),
            lambda: self._pool.room,
        )
        access = Access(TokenFiles(settings.tokens) if settings.tokens else None)
        self._servicer = CoordinatorServicer(
            self._sessions,
            self._services,
            self._policy,
            model,
            self._admission,
            DrainOrders(registry, self._pool),
            access,
            unread_s=settings.unread_s,
        )
        named = settings.tls_client_auth == REQUIRE
        self._server = rpc.Server(
            receive_bytes=CLIENT_MESSAGE_BYTES,
            tls=tls,
            require_client=named,
            checks=[*(settings.peer_checks(CLIENT_NAME) if named else ()), access.check],
        )
        self._serving = False
        self._watcher: asyncio.Task[None] | None = None
        self._log = logs.get(__name__)

    async def start(self) -> int:
        """Listen and return the port; health says serving once Redis answers.

        Raises:
            AddressInUseError: the port is taken.
        """
        coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(
            self._servicer, self._server.grpc
        )
        name = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"].full_name
        port = await self._server.start(name, self._settings.host, self._settings.port)
        await self._server.set_alive(True)
        self._warn_of_gaps()
        self._services.writer.start()
        self._watcher = asyncio.create_task(self._watch())
        self._log.info("listening", host=self._settings.host, port=port)
        return port

    def _warn_of_gaps(self) -> None:
        settings = self._settings
        if settings.tokens and not settings.tls_ca:
            self._log.warning("tokens travel in plaintext; use --tls-cert, --tls-key, --tls-ca")
        if settings.tls_ca and settings.tls_client_auth == NONE and not settings.tokens:
            self._log.warning("no certificate and no token is asked for; use --tokens")

    async def stop(self) -> None:
        """Stop without losing what can be finished."""
        # New work goes elsewhere first; what runs gets its time, with workers still watched.
        self._sessions.draining = True
        await self._set_serving(False)
        await self._sessions.drain(self._settings.drain_timeout_s)
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait([self._watcher])
        # Then the calls that are left, the links, and the last records.
        await self._server.stop(GRACE_S)
        await self._pool.close()
        await self._services.writer.close()

    async def _watch(self) -> None:
        while True:
            try:
                await self._look()
            except Exception:
                self._log.exception("watching the workers failed; trying again")
            await asyncio.sleep(REFRESH_S)

    async def _look(self) -> None:
        writer = self._services.writer
        await self._pool.refresh()
        if self._pool.reachable:
            await self._refresh_policy()
            await writer.catch_up()
            await self._orphans.look()
        else:
            writer.unreachable("the registry can't be read")
        self._sessions.check_drafters()
        self._admission.look()
        move_sessions(self._sessions.running.values(), self._pool)
        await self._set_serving(writer.reachable and not self._sessions.draining)

    async def _refresh_policy(self) -> None:
        try:
            await self._policy.refresh()
        except RecordsUnavailableError as error:
            self._log.warning("can't read the policy", error=error.message)

    async def _set_serving(self, serving: bool) -> None:
        if serving is not self._serving:
            self._serving = serving
            await self._server.set_serving(serving)


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Run a coordinator until `stop`."""
    model = await asyncio.to_thread(load_served_model, settings.model, settings.served_name)
    async with connect(
        settings.redis_url,
        password_file=settings.redis_password_file,
        tls=settings.redis_tls(),
        timeout_s=REDIS_TIMEOUT_S,
    ) as redis:
        coordinator = Coordinator(settings, model, redis)
        await coordinator.start()
        await stop.wait()
        await coordinator.stop()
