"""Which verify workers hold the KV of what a session begins with, asked of Redis."""

import asyncio
from collections.abc import Mapping, Sequence

from coordinator.placement import NONE_HELD
from outrider.errors import RecordsUnavailableError
from outrider.session.prefixes import Holder, PrefixDirectory, published_prefixes
from outrider.session.registry import WorkerRecord

# A session that starts waits no longer for an answer that only makes it faster.
LOOKUP_S = 0.2


class PrefixLookup:
    """One question to Redis for each placement, and none where the answer decides nothing."""

    def __init__(self, directory: PrefixDirectory, timeout_s: float = LOOKUP_S) -> None:
        self._directory = directory
        self._timeout_s = timeout_s

    async def held_tokens(
        self, token_ids: Sequence[int], workers: Sequence[WorkerRecord]
    ) -> Mapping[str, int]:
        """How many of the tokens each worker holds, by id; nothing when Redis does not tell.

        Other incarnations of a worker do not count.
        """
        if len(workers) < 2:
            return NONE_HELD
        fingerprints = {w.kv_fingerprint for w in workers if w.kv_fingerprint}
        prefixes = [p for name in fingerprints for p in published_prefixes(name, token_ids)]
        if not prefixes:
            return NONE_HELD
        try:
            async with asyncio.timeout(self._timeout_s):
                holders = await self._directory.holders(prefixes)
        except (TimeoutError, RecordsUnavailableError):
            return NONE_HELD
        held: dict[str, int] = {}
        for worker in workers:
            holder = Holder(worker.worker_id, worker.incarnation)
            held[worker.worker_id] = max(
                (
                    prefix.tokens
                    for prefix, found in zip(prefixes, holders, strict=True)
                    if holder in found and prefix.kv_fingerprint == worker.kv_fingerprint
                ),
                default=0,
            )
        return held
