"""Every service is ended by SIGTERM and started again, one after the other, under load."""

import asyncio
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from bench.cluster import Cluster
from bench.load import LETTERS, Load
from bench.paced_worker import paced
from bench.tiny import write_model
from bench.workers import running_records
from outrider.client import AsyncClient, Retry
from outrider.local.commands import StackSettings

DIFFERENT = 12


@pytest.mark.timeout(400)
async def test_no_completion_fails(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", letters=LETTERS, end=True)
    stack = StackSettings(model=str(model), threads=1, numerics="invariant", drain_s=1.0)
    load, expected = Load(64, DIFFERENT), Load(64, DIFFERENT)
    over = asyncio.Event()
    codes: dict[str, int] = {}

    def until_over() -> Iterator[int]:
        for number in count():
            if over.is_set():
                return
            yield number

    async def restart_all(cluster: Cluster) -> None:
        for name in cluster.services:
            codes[name] = await cluster.drain(name)
            await cluster.start_process(name)
            await cluster.ready()
        over.set()

    stand_ins = paced(("verify-1", "verify-2"), 0.05)
    async with Cluster(stack, stand_ins=stand_ins) as cluster:
        # The default of a first call is to give up soon: a drain must not need more.
        retry = Retry(resume_s=120.0)
        async with (
            AsyncClient(cluster.addresses, retry=retry) as one,
            AsyncClient(cluster.addresses[::-1], retry=retry) as other,
        ):
            await expected.run([one, other], range(DIFFERENT), at_once=12, speculation=False)
            async with asyncio.TaskGroup() as group:
                group.create_task(load.run([one, other], until_over(), at_once=6))
                group.create_task(restart_all(cluster))
        assert codes == dict.fromkeys(cluster.services, 0)
        assert load.failed == {}
        assert load.torn == []
        assert {
            n: said for n, said in load.said.items() if said != expected.said[n % DIFFERENT]
        } == {}
        assert await running_records(cluster.redis_url) == []
