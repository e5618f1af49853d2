"""Which worker takes a session; pure functions over what the registry says.

`load` counts the sessions that this coordinator has on each worker, by worker id: it is
exact at once, while the number that a worker reports is late by a heartbeat and only
decides between equals. Both count by the worker's `weight`: one that is twice as big gets twice
the sessions.

A verify worker that holds the KV of a prefix saves its prefill, and costs the sessions there a
larger batch. So it is taken in spite of `held tokens / TOKENS_A_SESSION` more sessions than
the least busy worker has, but never of more than a quarter of its capacity (one at least);
there, a worker is as busy as this coordinator or the worker itself says, whichever is more.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from outrider.errors import OverloadedError
from outrider.session.identity import ModelIdentity
from outrider.session.registry import WorkerRecord

TRUST_ALL = "all"
TOKENS_A_SESSION = 64
NONE_HELD: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Trust:
    """The draft workers whose q the operator vouches for, by id; `all` is every one.

    Workers name themselves in the registry, so whoever can write to Redis can take a name.
    """

    worker_ids: frozenset[str] = frozenset()

    def covers(self, worker_id: str) -> bool:
        """Whether the worker is trusted."""
        return TRUST_ALL in self.worker_ids or worker_id in self.worker_ids


def choose_verify_worker(
    workers: Iterable[WorkerRecord],
    load: Mapping[str, int],
    *,
    target: ModelIdentity | None,
    exclude: Collection[str] = (),
    held: Mapping[str, int] = NONE_HELD,
) -> WorkerRecord | None:
    """The best of the verify workers that take sessions; None when there is none.

    `target` is what the session is decoded with; no other worker will do. Of those the best is
    the one with most of the prefix in `held` (tokens, by worker id), unless it is too busy for
    that; else the least loaded. `exclude` names workers that have refused the session.

    Raises:
        OverloadedError: there are some, and all of them are full or have refused.
    """
    willing = [w for w in workers if w.identity == target and not w.draining]
    fit = [worker for worker in willing if worker.worker_id not in exclude and _room(worker, load)]
    if willing and not fit:
        raise OverloadedError(
            f"all {len(willing)} verify workers are full; try again later or start another one"
        )
    return _least_loaded(_worth_their_load(fit, load, held) or fit, load)


def choose_draft_worker(
    workers: Iterable[WorkerRecord],
    load: Mapping[str, int],
    *,
    tokenizer_fingerprint: str,
    trusted: Trust | None = None,
    exclude: Collection[tuple[str, str]] = (),
) -> WorkerRecord | None:
    """The least loaded of the draft workers that fit the tokenizer and have room, if any.

    `trusted`: only those that it covers. `exclude` holds (worker id, incarnation) of those
    that the session has lost.
    """
    fit = [
        worker
        for worker in workers
        if worker.tokenizer_fingerprint in ("", tokenizer_fingerprint)
        and not worker.draining
        and (trusted is None or trusted.covers(worker.worker_id))
        and (worker.worker_id, worker.incarnation) not in exclude
        and _room(worker, load)
    ]
    return _least_loaded(fit, load)


def _worth_their_load(
    workers: list[WorkerRecord], load: Mapping[str, int], held: Mapping[str, int]
) -> list[WorkerRecord]:
    """Those that hold most, of the workers that are not too busy for what they hold."""
    busy = {w.worker_id: max(load.get(w.worker_id, 0), w.sessions) for w in workers}
    least = min(busy.values(), default=0)

    def worth(worker: WorkerRecord) -> int:
        tokens = held.get(worker.worker_id, 0)
        more = min(tokens // TOKENS_A_SESSION, max(worker.capacity // 4, 1))
        return tokens if busy[worker.worker_id] <= least + more else 0

    most = max(map(worth, workers), default=0)
    return [worker for worker in workers if most and worth(worker) == most]


def _room(worker: WorkerRecord, load: Mapping[str, int]) -> bool:
    return load.get(worker.worker_id, 0) < worker.capacity


def _least_loaded(workers: list[WorkerRecord], load: Mapping[str, int]) -> WorkerRecord | None:
    def key(worker: WorkerRecord) -> tuple[float, float, str]:
        # Workers differ in size: what counts is the share of what one serves well.
        weight = worker.weight or worker.capacity
        return load.get(worker.worker_id, 0) / weight, worker.sessions / weight, worker.worker_id

    return min(workers, key=key, default=None)
