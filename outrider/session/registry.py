"""The workers that are up, as Redis knows them.

Each worker keeps a hash `outrider:worker:<pool>:<id>` alive by heartbeats; a worker that
says nothing for `ttl_s` is gone. The set `outrider:workers:<pool>` names the hashes, so that
nothing scans the keyspace; a name whose hash has expired is dropped by whoever lists. Pools have
sets of their own, so that draft workers can be kept from writing anything about others.

The field `order` of the hash is the only one that others write: it tells the worker to drain, or to
serve again. It names the incarnation that it is for, so a worker that starts again serves again.
"""

from dataclasses import dataclass
from enum import Enum
from operator import itemgetter

from outrider import logs
from outrider.session.identity import ModelIdentity
from outrider.session.redis import Redis, Script

HEARTBEATS_PER_TTL = 3
DRAIN, SERVE = "drain", "serve"

# Only when the hash is still gone: the worker may just have come back.
PRUNE = Script(
    """
if redis.call('EXISTS', KEYS[2]) == 0 then
  return redis.call('SREM', KEYS[1], KEYS[2])
end
return 0
"""
)
# Only a worker that is there can be told anything.
ORDER = Script(
    """
local incarnation = redis.call('HGET', KEYS[1], 'incarnation')
if not incarnation then
  return 0
end
redis.call('HSET', KEYS[1], 'order', ARGV[1] .. ' ' .. incarnation)
return 1
"""
)


class Pool(Enum):
    """What a worker does."""

    VERIFY = "verify"
    DRAFT = "draft"


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """What a worker says about itself.

    `incarnation` is fresh at each start of the process. `model` is the target of a verify
    worker and the drafter of a draft worker. `tokenizer_fingerprint` "" fits any target.
    `capacity` and `sessions` count sessions; `weight` is how many it serves well, by which they are
    shared out, 0 being as many as it takes; `context_len` counts tokens. `dtype` and `numerics`
    say how a verify worker computes, and `kv_fingerprint` (`outrider.model.prefix`) which prefixes
    it keeps, "" being none; draft workers leave them empty. Coordinators of another `group` do not
    use the worker.
    """

    pool: Pool
    worker_id: str
    address: str
    incarnation: str
    model: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    capacity: int
    sessions: int
    draining: bool
    context_len: int
    kv_fingerprint: str = ""
    dtype: str = ""
    numerics: str = ""
    weight: int = 0
    group: str = ""

    @property
    def identity(self) -> ModelIdentity:
        """What another verify worker must agree on to go on with a session of this one."""
        return ModelIdentity(self.model_fingerprint, self.dtype, self.numerics)


class Registry:
    """Says and reads which workers are up.

    Every method raises `RecordsUnavailableError` when Redis does not answer.
    """

    def __init__(self, redis: Redis, ttl_s: float = 3.0) -> None:
        self._redis = redis
        self.ttl_s = ttl_s

    async def announce(self, record: WorkerRecord) -> bool | None:
        """Write the record, which expires `ttl_s` seconds from now.

        Returns what the worker has been told: to drain (True), to serve (False), or nothing.
        """
        key = worker_key(record.pool, record.worker_id)
        fields = [word for pair in _to_hash(record).items() for word in pair]
        *_, order = await self._redis.transaction(
            [
                ("HSET", key, *fields),
                ("PEXPIRE", key, int(self.ttl_s * 1000)),
                ("SADD", index_key(record.pool), key),
                ("HGET", key, "order"),
            ]
        )
        word, _, incarnation = (order or b"").decode().partition(" ")
        return word == DRAIN if incarnation == record.incarnation else None

    async def order(self, pool: Pool, worker_id: str, *, draining: bool) -> bool:
        """Tell a worker to drain or to serve; False when there is no such worker."""
        word = DRAIN if draining else SERVE
        return bool(await self._redis.run(ORDER, [worker_key(pool, worker_id)], [word]))

    async def withdraw(self, record: WorkerRecord) -> None:
        """Remove the record, unless a later incarnation of the worker has written its own.

        Workers may run no scripts. A successor that writes between the two steps is gone until it
        announces itself again, a heartbeat later.
        """
        key = worker_key(record.pool, record.worker_id)
        incarnation = await self._redis.command("HGET", key, "incarnation")
        if incarnation == record.incarnation.encode():
            commands = [("DEL", key), ("SREM", index_key(record.pool), key)]
            await self._redis.transaction(commands)

    async def list_workers(self, group: str | None = None) -> list[WorkerRecord]:
        """Every worker that is up, or those of one group, by pool and id."""
        indexes = await self._redis.batch([("SMEMBERS", index_key(pool)) for pool in Pool])
        named = (
            (word.decode("utf-8", "replace"), pool)
            for pool, index in zip(Pool, indexes, strict=True)
            for word in index
        )
        # A draft worker can write what it likes into its set.
        ours = ((name, pool) for name, pool in named if name.startswith(worker_key(pool, "")))
        names = sorted(ours, key=itemgetter(0))
        replies = await self._redis.batch([("HGETALL", name) for name, _ in names])
        records = []
        for (name, pool), reply in zip(names, replies, strict=True):
            if not reply:
                await self._redis.run(PRUNE, [index_key(pool), name])
                continue
            try:
                records.append(_from_hash(name, _pairs(reply)))
            except (KeyError, ValueError) as error:
                # One worker of another version must not hide the rest.
                logs.get(__name__).warning(
                    "can't read a worker's record", key=name, error=repr(error)
                )
        return [record for record in records if group in (None, record.group)]


def index_key(pool: Pool) -> str:
    """The set that names the workers of a pool."""
    return f"outrider:workers:{pool.value}"


def worker_key(pool: Pool, worker_id: str) -> str:
    """The hash of a worker."""
    return f"outrider:worker:{pool.value}:{worker_id}"


def _to_hash(record: WorkerRecord) -> dict[str, str | int]:
    return {
        "address": record.address,
        "incarnation": record.incarnation,
        "model": record.model,
        "model_fingerprint": record.model_fingerprint,
        "tokenizer_fingerprint": record.tokenizer_fingerprint,
        "capacity": record.capacity,
        "sessions": record.sessions,
        "draining": int(record.draining),
        "context_len": record.context_len,
        "kv_fingerprint": record.kv_fingerprint,
        "dtype": record.dtype,
        "numerics": record.numerics,
        "weight": record.weight,
        "group": record.group,
    }


def _pairs(reply: object) -> dict[str, str]:
    """A hash reply as a dict, whichever form the protocol version gives it."""
    if isinstance(reply, dict):
        items = list(reply.items())
    else:
        assert isinstance(reply, list)
        items = list(zip(reply[::2], reply[1::2], strict=True))
    return {key.decode(): value.decode() for key, value in items}


def _from_hash(key: str, fields: dict[str, str]) -> WorkerRecord:
    _, _, pool, worker_id = key.split(":", 3)
    return WorkerRecord(
        pool=Pool(pool),
        worker_id=worker_id,
        address=fields["address"],
        incarnation=fields["incarnation"],
        model=fields["model"],
        model_fingerprint=fields["model_fingerprint"],
        tokenizer_fingerprint=fields["tokenizer_fingerprint"],
        capacity=int(fields["capacity"]),
        sessions=int(fields["sessions"]),
        draining=fields["draining"] == "1",
        context_len=int(fields["context_len"]),
        kv_fingerprint=fields.get("kv_fingerprint", ""),
        # Workers of earlier versions do not say.
        dtype=fields.get("dtype", ""),
        numerics=fields.get("numerics", ""),
        weight=int(fields.get("weight", 0)),
        group=fields.get("group", ""),
    )
