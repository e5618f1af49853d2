"""Whole systems of separate processes: a caller's iterator goes on, whatever is killed or drained.

Steps take a while, as those of a large model do, so that whatever happens does so in mid-stream.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bench.cluster import Cluster, Size
from bench.paced_worker import paced
from outrider.cli import main
from outrider.client import AsyncClient, AsyncGeneration, Client
from outrider.local.commands import StackSettings
from outrider.messages import FinishReason
from tests.support.models import save_model

NEW_TOKENS = 48
PACE_S = 0.03
ENOUGH = 5
DEADLINE_S = 60
OPTIONS: dict[str, Any] = {
    "token_ids": [5, 9, 2, 5, 9, 2, 5],
    "max_tokens": NEW_TOKENS,
    "temperature": 0.8,
    "seed": 7,
}

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("target"))


@asynccontextmanager
async def running(target: Path, **size: int) -> AsyncIterator[tuple[Cluster, AsyncClient]]:
    settings = StackSettings(
        model=str(target),
        drafter="none",
        threads=1,
        drain_s=60.0,
        coordinator_flags=("--drain-timeout-s", "0.1"),
    )
    slow = paced(("verify-1", "verify-2"), PACE_S)
    cluster = Cluster(settings, size=Size(draft_workers=0, **size), stand_ins=slow)
    async with cluster, AsyncClient(cluster.addresses) as client:
        yield cluster, client


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.05)


class Reader:
    """Reads a generation in the background."""

    def __init__(self, generation: AsyncGeneration) -> None:
        self.generation = generation
        self._enough = asyncio.Event()
        self._task = asyncio.create_task(self._read())

    async def begun(self) -> None:
        """Wait until it is in mid-stream."""
        await self._enough.wait()
        assert not self._task.done()

    async def all(self) -> tuple[int, ...]:
        """The ids as the iterator gave them."""
        return tuple(await self._task)

    async def _read(self) -> list[int]:
        seen: list[int] = []
        async for chunk in self.generation:
            assert chunk.offset == len(seen)
            seen += chunk.token_ids
            if len(seen) >= ENOUGH:
                self._enough.set()
        return seen


async def test_the_caller_does_not_notice_that_its_coordinator_is_killed(target: Path) -> None:
    async with running(target, verify_workers=1) as (cluster, client):
        expected = (await client.complete(**OPTIONS)).token_ids
        assert len(expected) == NEW_TOKENS
        reader = Reader(client.generate(**OPTIONS))
        await reader.begun()
        await cluster.kill("coordinator-1")
        assert await reader.all() == expected
        completion = await reader.generation.complete()
        assert completion.finish_reason is FinishReason.LENGTH
        assert completion.usage.completion_tokens == NEW_TOKENS
        assert reader.generation.reconnects >= 1
        session = await client.get_session(reader.generation.session_id)
        assert (session.state, session.token_ids) == ("finished", expected)
        # The same under a synchronous caller, at the other coordinator.
        await cluster.start_process("coordinator-1")
        await cluster.ready()
        pid = cluster.process("coordinator-2").pid
        addresses = cluster.addresses[::-1]
        assert await asyncio.to_thread(kill_in_mid_stream, addresses, pid) == expected


def kill_in_mid_stream(addresses: list[str], pid: int) -> tuple[int, ...]:
    with Client(addresses) as client:
        generation = client.generate(**OPTIONS)
        seen: list[int] = []
        for chunk in generation:
            seen += chunk.token_ids
            if len(seen) >= ENOUGH and not generation.reconnects:
                os.kill(pid, signal.SIGKILL)
        assert generation.reconnects >= 1
        assert generation.complete().token_ids == tuple(seen)
        return tuple(seen)


async def test_the_caller_does_not_notice_that_what_serves_it_is_stopped(target: Path) -> None:
    async with running(target) as (cluster, client):
        expected = (await client.complete(**OPTIONS)).token_ids
        # A worker that is told to drain gives its sessions to the other one.
        readers = [Reader(client.generate(**OPTIONS)) for _ in range(2)]
        for reader in readers:
            await reader.begun()
        result = await asyncio.to_thread(drain, cluster, "verify-1")
        assert result.output == "verify-1 has no sessions and takes no more; it can be stopped\n"
        assert result.exit_code == 0
        # It can be told otherwise.
        assert await client.drain("verify-1", draining=False) == 0
        assert await client.drain("verify-1") == 0
        assert await cluster.drain("verify-1") == 0
        assert [await reader.all() for reader in readers] == [expected] * 2
        # A new start of it serves again, and one that is only told to stop does the same.
        await cluster.start_process("verify-1")
        await cluster.ready()
        readers = [Reader(client.generate(**OPTIONS)) for _ in range(2)]
        for reader in readers:
            await reader.begun()
        assert await cluster.drain("verify-2") == 0
        assert [await reader.all() for reader in readers] == [expected] * 2
        assert all(reader.generation.reconnects == 0 for reader in readers)
        # A coordinator ends its streams, and the client goes on at the other one.
        reader = Reader(client.generate(**OPTIONS))
        await reader.begun()
        assert await cluster.drain("coordinator-1") == 0
        assert await reader.all() == expected
        assert reader.generation.reconnects >= 1


def drain(cluster: Cluster, worker: str) -> Result:
    where = [flag for address in cluster.addresses for flag in ("--coordinator", address)]
    return CliRunner().invoke(main, ["drain", *where, worker])


async def test_who_leaves_early_leaves_nothing_behind(target: Path) -> None:
    async with running(target, verify_workers=1) as (cluster, client):
        async with client.generate(**OPTIONS, session_id="left") as left:
            async for _ in left:
                break
        reader = Reader(client.generate(**OPTIONS, session_id="cancelled"))
        await reader.begun()
        reader.generation.cancel()
        await reader.all()
        async with AsyncClient(cluster.addresses[::-1]) as other:

            async def ended(name: str) -> bool:
                session = await other.get_session(name)
                return session.finish_reason is FinishReason.CANCELLED

            async def idle() -> bool:
                return not any(
                    [(await asked.status()).running_sessions for asked in (client, other)]
                )

            await until(lambda: ended("left"))
            await until(lambda: ended("cancelled"))
            await until(idle)
