"""Which verify workers hold the KV of which prefix, as Redis knows it.

    outrider:prefix:<kv fingerprint>:<hash>   sorted set: "<incarnation> <worker id>" by the
                                              time at which it expires

Fingerprint and hash are those of `outrider.model.prefix`. Only every `STRIDE_BLOCKS`-th block
of the first `DEEPEST_BLOCKS` is published: less than that is computed in about a step, and
whatever begins with more is found by its beginning. All of this is a hint: a worker that has
evicted a prefix computes it again.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from outrider.errors import RecordsUnavailableError
from outrider.model.blocks import BLOCK_TOKENS
from outrider.model.prefix import extend_chain
from outrider.session.redis import Redis, Value

PREFIX_KEYS = "outrider:prefix:*"
STRIDE_BLOCKS = 4
DEEPEST_BLOCKS = 256
# What one worker publishes, the newest of it, and how much of that it says at once.
MOST_PUBLISHED = 2048
MOST_A_ROUND = 128
ROUND_S = 1.0
TTL_S = 60.0
REFRESHES_PER_TTL = 3


@dataclass(frozen=True, slots=True)
class Holder:
    """One process of a verify worker."""

    worker_id: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first `tokens` tokens of a text, by their hash."""

    kv_fingerprint: str
    block_hash: bytes
    tokens: int

    @property
    def key(self) -> str:
        """Its key in Redis."""
        return _key(self.kv_fingerprint, self.block_hash)


def is_published(depth: int) -> bool:
    """Whether a prefix of so many blocks is worth publishing."""
    return depth % STRIDE_BLOCKS == 0 and depth <= DEEPEST_BLOCKS


def published_prefixes(kv_fingerprint: str, token_ids: Sequence[int]) -> list[Prefix]:
    """The beginnings of a text that workers may have published, the shortest first."""
    chain: list[bytes] = []
    extend_chain(chain, kv_fingerprint, token_ids[: DEEPEST_BLOCKS * BLOCK_TOKENS])
    return [
        Prefix(kv_fingerprint, block_hash, depth * BLOCK_TOKENS)
        for depth, block_hash in enumerate(chain, 1)
        if is_published(depth)
    ]


class PrefixDirectory:
    """Says and reads who holds what.

    Every method is one round trip and raises `RecordsUnavailableError` when Redis does not
    answer.
    """

    def __init__(
        self, redis: Redis, *, ttl_s: float = TTL_S, clock: Callable[[], float] = time.time
    ) -> None:
        self.ttl_s = ttl_s
        self._redis = redis
        # The wall clock, since several machines write: one that is off by a ttl is not found.
        self._clock = clock

    async def change(
        self,
        kv_fingerprint: str,
        holder: Holder,
        *,
        held: Sequence[bytes] = (),
        dropped: Sequence[bytes] = (),
    ) -> None:
        """Publish the hashes `held` for `ttl_s` seconds, and those `dropped` no more."""
        now = self._clock()
        member = f"{holder.incarnation} {holder.worker_id}"
        commands: list[Sequence[Value]] = []
        for block_hash in dropped:
            commands.append(("ZREM", _key(kv_fingerprint, block_hash), member))
        for block_hash in held:
            key = _key(kv_fingerprint, block_hash)
            commands.append(("ZADD", key, str(now + self.ttl_s), member))
            # Those that went without a word, unless their clock is just a little behind.
            commands.append(("ZREMRANGEBYSCORE", key, "-inf", str(now - self.ttl_s)))
            commands.append(("PEXPIRE", key, int(self.ttl_s * 1000)))
        await self._redis.batch(commands)

    async def holders(self, prefixes: Sequence[Prefix]) -> list[frozenset[Holder]]:
        """For each prefix who has published it."""
        replies = await self._redis.batch([("ZRANGE", p.key, 0, -1) for p in prefixes])
        return [frozenset(map(_holder, reply)) for reply in replies]


class Publisher:
    """What a worker has said about its prefixes, and what it says next: no I/O, no clock."""

    def __init__(self, ttl_s: float = TTL_S) -> None:
        self.said: dict[bytes, float] = {}
        self._refresh_s = ttl_s / REFRESHES_PER_TTL

    def due(self, depths: Mapping[bytes, int], now_s: float) -> tuple[list[bytes], list[bytes]]:
        """The hashes to publish and to withdraw next, given all that is held, oldest first."""
        worth = [block_hash for block_hash, depth in depths.items() if is_published(depth)]
        worth = worth[-MOST_PUBLISHED:]
        gone = self.said.keys() - worth
        latest_s = now_s - self._refresh_s
        held = [h for h in worth if self.said.get(h, latest_s) <= latest_s]
        # What nobody knows of yet comes first.
        held.sort(key=lambda block_hash: block_hash in self.said)
        return held[:MOST_A_ROUND], list(gone)[:MOST_A_ROUND]

    def note(self, held: Sequence[bytes], dropped: Sequence[bytes], now_s: float) -> None:
        """It was said."""
        self.said.update(dict.fromkeys(held, now_s))
        for block_hash in dropped:
            del self.said[block_hash]

    def doubt(self) -> None:
        """Redis was away and may have forgotten everything."""
        self.said = dict.fromkeys(self.said, float("-inf"))


async def keep_published(
    directory: PrefixDirectory,
    kv_fingerprint: str,
    holder: Holder,
    read: Callable[[], Mapping[bytes, int]],
    stop: asyncio.Event,
) -> None:
    """Publish what `read` gives (hashes and their depths) once a second until `stop`.

    While Redis does not answer nothing is said; afterwards everything is said again.
    """
    publisher = Publisher(directory.ttl_s)
    while not stop.is_set():
        now_s = time.monotonic()
        held, dropped = publisher.due(read(), now_s)
        try:
            if held or dropped:
                await directory.change(kv_fingerprint, holder, held=held, dropped=dropped)
            publisher.note(held, dropped, now_s)
        except RecordsUnavailableError:
            publisher.doubt()
        try:
            async with asyncio.timeout(ROUND_S):
                await stop.wait()
        except TimeoutError:
            continue
    try:
        await directory.change(kv_fingerprint, holder, dropped=list(publisher.said))
    except RecordsUnavailableError:
        return  # it expires


def _key(kv_fingerprint: str, block_hash: bytes) -> str:
    return f"outrider:prefix:{kv_fingerprint}:{block_hash.hex()}"


def _holder(member: bytes) -> Holder:
    incarnation, _, worker_id = member.decode().partition(" ")
    return Holder(worker_id, incarnation)
