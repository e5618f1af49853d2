"""The workers as this coordinator sees them, and its links to the verify workers.

The registry is read twice a second. A verify worker that serves the model gets one link;
a new incarnation, or a worker that is gone, ends the old one. A worker counts as gone when
it is missing from the registry for `grace_s` and has said nothing on its link either: after
Redis came back empty, workers need a moment to announce themselves again, and a worker that
drains has left the registry but still finishes its sessions.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from coordinator.decode_link import DecodeLink
from coordinator.placement import (
    NONE_HELD,
    Trust,
    choose_draft_worker,
    choose_verify_worker,
)
from coordinator.prefixes import PrefixLookup
from coordinator.quarantine import Quarantine
from outrider import logs
from outrider.errors import (
    NoVerifyWorkerError,
    OutriderError,
    OverloadedError,
    RecordsUnavailableError,
)
from outrider.messages import DraftWorkerRef
from outrider.session.identity import ModelIdentity
from outrider.session.registry import Pool, Registry, WorkerRecord
from outrider.tls import TlsFiles


@dataclass(slots=True)
class _Seen:
    record: WorkerRecord
    # When a listing first lacked it.
    missing_since: float | None = None


class WorkerPool:
    """Knows the workers, keeps the links, and chooses who takes a session.

    Only verify workers with the model's fingerprint are used. An empty `model_fingerprint` takes
    that of the first worker with the right tokenizer. New sessions also get only workers that
    compute alike (see `ModelIdentity`): like the first one that came, until none of its kind is
    left; a session is placed again only on its own kind. `model` is the name in messages. Workers
    of another `group` are as if they were not there.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        model: str,
        model_fingerprint: str,
        tokenizer_fingerprint: str,
        group: str = "",
        trust: Trust | None = None,
        prefixes: PrefixLookup | None = None,
        grace_s: float = 3.0,
        silence_s: float = 5.0,
        tls: TlsFiles | None = None,
    ) -> None:
        self.group = group
        self.reachable = False
        self.links: dict[str, DecodeLink] = {}
        # Sessions of this coordinator by draft worker.
        self.drafted: Counter[str] = Counter()
        self._quarantine = Quarantine()
        self._registry = registry
        self._model = model
        self._model_fingerprint = model_fingerprint
        # What new sessions are decoded with; None before the first worker came.
        self._target: ModelIdentity | None = None
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._trust = trust or Trust()
        self._prefixes = prefixes
        self._grace_s = grace_s
        self._silence_s = silence_s
        self._tls = tls
        self._seen: dict[tuple[Pool, str], _Seen] = {}
        # Why the last link to a worker never came about.
        self._troubles: dict[str, str] = {}
        self._changed = asyncio.Event()
        self._log = logs.get(__name__)

    def workers(self, pool: Pool) -> list[WorkerRecord]:
        """The workers of a pool that are in the registry."""
        return [
            seen.record
            for (kind, _), seen in self._seen.items()
            if kind is pool and seen.missing_since is None
        ]

    def is_up(self, draft_worker: WorkerRecord) -> bool:
        """Whether this incarnation of a draft worker is there and takes sessions."""
        seen = self._seen.get((Pool.DRAFT, draft_worker.worker_id))
        if seen is None or seen.record.draining:
            return False
        return seen.record.incarnation == draft_worker.incarnation

    def is_draining(self, verify_worker_id: str) -> bool:
        """Whether a verify worker has said, in whichever way, that its sessions had better move."""
        seen = self._seen.get((Pool.VERIFY, verify_worker_id))
        link = self.links.get(verify_worker_id)
        return (seen is not None and seen.record.draining) or (link is not None and link.draining)

    def quarantine(self, draft_worker: WorkerRecord, why: str) -> None:
        """Give no session to a draft worker that sent rubbish, for a while that grows."""
        seconds = self._quarantine.add(draft_worker)
        if seconds is not None:
            self._log.warning(
                "draft worker quarantined",
                worker_id=draft_worker.worker_id,
                incarnation=draft_worker.incarnation,
                seconds=seconds,
                why=why,
            )

    def is_quarantined(self, draft_worker: WorkerRecord) -> bool:
        """Whether no session is given to the draft worker now."""
        return self._quarantine.holds(draft_worker)

    def choose_link(
        self,
        exclude: Collection[str] = (),
        target: ModelIdentity | None = None,
        held: Mapping[str, int] = NONE_HELD,
    ) -> DecodeLink | None:
        """The link to the best verify worker for a session; None when none is up.

        `target` is what the session was decoded with so far, None for a new one; `held` how much
        of its prefix each worker has.

        Raises:
            OverloadedError: all that are up are full, or in `exclude`.
        """
        load = {worker_id: link.sessions for worker_id, link in self.links.items()}
        chosen = choose_verify_worker(
            self._ready, load, target=target or self._target, exclude=exclude, held=held
        )
        return self.links[chosen.worker_id] if chosen else None

    async def wait_for_link(
        self,
        wait_s: float,
        *,
        exclude: Collection[str],
        give_up: Callable[[], bool],
        for_room: bool = False,
        token_ids: Sequence[int] = (),
        target: ModelIdentity | None = None,
    ) -> DecodeLink | None:
        """Like `choose_link`, but waits for a verify worker; None once `give_up` says so.

        `for_room` also waits while all are full. One that holds the KV of what `token_ids`
        begin with is preferred.

        Raises:
            NoVerifyWorkerError: none came within `wait_s`.
            OverloadedError: all that are up are full, or in `exclude`.
        """
        deadline = time.monotonic() + wait_s
        held = NONE_HELD
        if self.reachable and self._prefixes is not None:
            held = await self._prefixes.held_tokens(token_ids, self._ready)
        while not give_up():
            lacking: OutriderError | None = None
            try:
                link = self.choose_link(exclude, target, held)
            except OverloadedError as error:
                if not for_room:
                    raise
                link, lacking = None, error
            if link is not None:
                return link
            changed = self._changed
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await changed.wait()
            except TimeoutError:
                raise lacking or self._no_verify_worker(target or self._target) from None
        return None

    def choose_draft_worker(
        self, exclude: Collection[tuple[str, str]] = (), *, trusted_only: bool = False
    ) -> WorkerRecord | None:
        """The best draft worker for a session, if there is one."""
        return choose_draft_worker(
            self.workers(Pool.DRAFT),
            self.drafted,
            tokenizer_fingerprint=self._tokenizer_fingerprint,
            trusted=self._trust if trusted_only else None,
            exclude={*exclude, *self._quarantine.workers},
        )

    @property
    def has_trusted_draft_worker(self) -> bool:
        """Whether a draft worker is up that fits and is trusted; it may be full."""
        found = choose_draft_worker(
            self.workers(Pool.DRAFT),
            {},
            tokenizer_fingerprint=self._tokenizer_fingerprint,
            trusted=self._trust,
        )
        return found is not None

    def ref(self, draft_worker: WorkerRecord) -> DraftWorkerRef:
        """A draft worker as it is named to verify workers."""
        trusted = self._trust.covers(draft_worker.worker_id)
        return DraftWorkerRef(draft_worker.worker_id, draft_worker.address, trusted)

    def wake(self) -> None:
        """Let those who wait for a link look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def refresh(self) -> None:
        """Read the registry once and bring the links in line with it."""
        try:
            listed = await self._registry.list_workers(self.group)
        except RecordsUnavailableError as error:
            if self.reachable:
                self._log.warning("can't read the registry", error=error.message)
            self.reachable = False
        else:
            self.reachable = True
            self._note(listed)
            self._choose_target()
        for worker in self.workers(Pool.VERIFY):
            if self._serves_model(worker):
                await self._link(worker)
        self.wake()
        await self._forget_gone()

    async def close(self) -> None:
        """End every link."""
        for link in list(self.links.values()):
            await link.close()
        self.links.clear()

    def _serves_model(self, worker: WorkerRecord) -> bool:
        if worker.tokenizer_fingerprint not in ("", self._tokenizer_fingerprint):
            return False
        if not self._model_fingerprint:
            # Without weights at hand, the first worker says which they are.
            self._model_fingerprint = worker.model_fingerprint
            self._log.info("model found", fingerprint=worker.model_fingerprint)
        return worker.model_fingerprint == self._model_fingerprint

    @property
    def room(self) -> int:
        """How many sessions the verify workers for new sessions take in all."""
        fit = (w for w in self._ready if w.identity == self._target and not w.draining)
        return sum(worker.capacity for worker in fit)

    @property
    def _ready(self) -> list[WorkerRecord]:
        return [worker for worker in self.workers(Pool.VERIFY) if self._is_ready(worker)]

    def _choose_target(self) -> None:
        """Stay with one kind of worker while any of it may be there, else take the first's."""
        now = time.monotonic()
        kinds = {
            seen.record.identity
            for (pool, _), seen in self._seen.items()
            if pool is Pool.VERIFY
            and (seen.missing_since is None or now - seen.missing_since < self._grace_s)
        }
        if self._target in kinds:
            return
        for worker in self.workers(Pool.VERIFY):
            if self._serves_model(worker):
                self._target = worker.identity
                self._log.info("new sessions compute in", computing=self._target.computing)
                return

    def _is_ready(self, worker: WorkerRecord) -> bool:
        link = self.links.get(worker.worker_id)
        return (
            link is not None
            and link.connected
            and not link.draining
            and link.worker.incarnation == worker.incarnation
            and self._serves_model(worker)
        )

    def _note(self, listed: list[WorkerRecord]) -> None:
        now = time.monotonic()
        present = {(record.pool, record.worker_id) for record in listed}
        for record in listed:
            self._seen[record.pool, record.worker_id] = _Seen(record)
        for key, seen in self._seen.items():
            if key not in present and seen.missing_since is None:
                seen.missing_since = now

    async def _link(self, worker: WorkerRecord) -> None:
        link = self.links.get(worker.worker_id)
        if link is not None and link.worker.incarnation != worker.incarnation:
            self._log.info("verify worker started again", worker_id=worker.worker_id)
            await link.close()
        if link is not None and link.closed and link.why != self._troubles.get(worker.worker_id):
            # Once, although it is tried again twice a second.
            self._troubles[worker.worker_id] = link.why
            if link.why:
                self._log.warning(
                    "no stream to a verify worker", worker_id=worker.worker_id, why=link.why
                )
        if link is None or link.closed:
            self.links[worker.worker_id] = DecodeLink(worker, self.wake, self._silence_s, self._tls)
            if worker.identity != self._target:
                self._log.warning(
                    "verify worker gets no new sessions, as it computes otherwise",
                    worker_id=worker.worker_id,
                    computing=worker.identity.computing,
                    others=self._target and self._target.computing,
                )

    async def _forget_gone(self) -> None:
        now = time.monotonic()
        for (pool, worker_id), seen in list(self._seen.items()):
            if seen.missing_since is None or now - seen.missing_since < self._grace_s:
                continue
            link = self.links.get(worker_id) if pool is Pool.VERIFY else None
            if link is not None and not link.closed and link.silent_s < self._grace_s:
                continue
            self._log.warning("worker is gone", pool=pool.value, worker_id=worker_id)
            del self._seen[pool, worker_id]
            self._troubles.pop(worker_id, None)
            if link is not None:
                del self.links[worker_id]
                await link.close()

    def _no_verify_worker(self, target: ModelIdentity | None) -> OutriderError:
        workers = self.workers(Pool.VERIFY)
        others = sorted({f"{w.model} in {w.identity.computing}" for w in workers})
        serving = f" (those that are up serve {', '.join(others)})" if others else ""
        wanted, flags = self._model, ""
        if target is not None:
            wanted += f" in {target.computing}"
            flags = f" {target.flags}"
        return NoVerifyWorkerError(
            f"no verify worker with {wanted} is up{serving}; start one with "
            f"`outrider verify-worker --model PATH{flags}` and the same --redis-url and --group"
        )
