"""Verify workers whose ranks are Ray actors: lost, refused, and ended with the worker."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from bench.cluster import Cluster, Size
from bench.ray_nodes import Placed, all_taken, events, placed, two_nodes
from bench.tiny import write_model
from outrider.client import AsyncClient, Completion
from outrider.errors import ConfigError
from outrider.local.commands import StackSettings
from verify_worker import ray_group
from verify_worker.ray_group import RayRanks

pytestmark = pytest.mark.timeout(300)

LETTERS = 24
SESSIONS = 8
NEW = 120
SPLIT, WHOLE = "verify-1", "verify-2"


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    with two_nodes() as address:
        yield address


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), letters=LETTERS)


async def until(condition: Callable[[], bool | Awaitable[bool]], what: str) -> None:
    for _ in range(2400):
        found = condition()
        if found if isinstance(found, bool) else await found:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"it never came about: {what}")


async def say(client: AsyncClient, number: int) -> Completion:
    """A greedy one repeats itself, so that its drafts are accepted."""
    return await client.generate(
        token_ids=[number, 1, 2, 3],
        max_tokens=NEW,
        temperature=0.9 * (number % 2),
        seed=number,
        ignore_eos=True,
    ).complete()


async def incarnation(client: AsyncClient, name: str) -> str:
    """Of a worker that is up and takes sessions; "" while there is none."""
    for worker in (await client.status()).workers:
        if worker.worker_id == name and worker.connected and not worker.draining:
            return worker.incarnation
    return ""


async def gone(client: AsyncClient) -> bool:
    return not await incarnation(client, SPLIT)


async def sessions_on(client: AsyncClient, name: str) -> int:
    workers = (await client.status()).workers
    return sum(worker.sessions for worker in workers if worker.worker_id == name)


async def test_sessions_go_on_when_a_rank_on_another_node_is_killed_or_stopped(
    ray_address: str, model: Path
) -> None:
    split = ("verify_worker", "--tensor-parallel-size", "2", "--ray-address", ray_address)
    spread = ("--ray-strategy", "spread", "--rank-timeout-s", "2")
    stack = StackSettings(
        model=str(model),
        threads=1,
        k="fixed:3",
        verify_flags=("--forward", "lean", "--kv-memory", "4MiB", "--no-calibrate"),
    )
    pace = ("bench.paced_worker", "0.03")
    cluster = Cluster(
        stack,
        size=Size(coordinators=1, draft_workers=1),
        stand_ins={SPLIT: (*pace, *split[1:], *spread), WHOLE: pace},
    )
    async with cluster, AsyncClient(cluster.addresses) as client:
        log = cluster.run_dir / f"{SPLIT}.log"
        first, second = placed(log)
        assert first.node != second.node
        expected = await asyncio.gather(*(say(client, number) for number in range(SESSIONS)))
        for fault in (signal.SIGKILL, signal.SIGSTOP):
            before = await incarnation(client, SPLIT)
            lost = len(events(log, "the ranks start anew"))
            running = [asyncio.create_task(say(client, number)) for number in range(SESSIONS)]
            await until(lambda: busy(client), "sessions on the split worker")
            victim: Placed = placed(log)[1]
            os.kill(victim.pid, fault)
            await until(lambda: gone(client), "coordinators take it for gone")
            said = await asyncio.gather(*running)
            # Unchanged, and drafts had a part in it.
            assert [c.token_ids for c in said] == [c.token_ids for c in expected]
            assert all(len(completion.token_ids) == NEW for completion in said)
            assert sum(c.speculation.accepted_tokens for c in said) > NEW

            async def back(before: str = before) -> bool:
                return await incarnation(client, SPLIT) not in ("", before)

            await until(back, "the split worker is back")
            assert len(events(log, "the ranks start anew")) == lost + 1
            assert not psutil.pid_exists(victim.pid)
        # The new group serves, too.
        await until(lambda: served(client, expected), "a session on the new group")
        assert await cluster.drain(SPLIT) == 0


async def busy(client: AsyncClient) -> bool:
    return await sessions_on(client, SPLIT) > 0


async def served(client: AsyncClient, expected: Sequence[Completion]) -> bool:
    again = [asyncio.create_task(say(client, number)) for number in range(SESSIONS)]
    used = False
    while not all(task.done() for task in again):
        used = used or await busy(client)
        await asyncio.sleep(0.01)
    assert [task.result().token_ids for task in again] == [c.token_ids for c in expected]
    return used


async def refusal(**fields: Any) -> str:
    """Why there is no place for two ranks; as a worker asks, beside the main thread."""

    def place() -> None:
        ranks = RayRanks.connect(ray_group.Cluster(size=2, **fields))
        try:
            ranks.place()
        finally:
            ranks.close()

    with pytest.raises(ConfigError) as caught:
        await asyncio.to_thread(place)
    return caught.value.message


async def test_what_can_not_start_is_told_with_its_cause(ray_address: str) -> None:
    told = await refusal(address=ray_address)
    assert "too few resources for 2 ranks of 1 CPU each on this host" in told
    assert "(this host): 1 CPU" in told
    told = await refusal(address=ray_address, strategy="spread", cpus=2)
    assert "too few resources for 2 ranks of 2 CPU each on the cluster" in told
    with all_taken(ray_address):
        # As a stranger: that one is connected from this process.
        told = await asyncio.to_thread(crowded, ray_address)
    assert "no room for 2 ranks of 1 CPU each on the cluster within 1 s" in told
    assert "no Ray at 127.0.0.1:9: " in await refusal(address="127.0.0.1:9")
    assert "is not HOST:PORT" in await refusal(address="ray://there")


def crowded(address: str) -> str:
    ranks = RayRanks(ray_group.Cluster(size=2, address=address, strategy="spread", start_s=1.0))
    with pytest.raises(ConfigError) as caught:
        ranks.place()
    return caught.value.message


async def test_a_ray_of_its_own_ends_with_it() -> None:
    def begin() -> tuple[RayRanks, list[psutil.Process]]:
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        ranks = RayRanks.connect(ray_group.Cluster(size=2))
        assert ranks.place() == torch.device("cpu")
        now = psutil.Process().children(recursive=True)
        return ranks, [child for child in now if child.pid not in before]

    ranks, started = await asyncio.to_thread(begin)
    assert any("RankActor" in " ".join(child.cmdline()) for child in started if alive(child))
    await asyncio.to_thread(ranks.close)
    await until(lambda: not any(map(alive, started)), "nothing of it is left")


def test_one_rank_needs_no_ray(model: Path) -> None:
    code = (
        "import dataclasses, sys; sys.modules['ray'] = None\n"
        "from outrider.errors import ConfigError\n"
        "from verify_worker import app\n"
        "from verify_worker.config import Settings\n"
        f"settings = Settings(model={str(model)!r}, redis_url='', kv_memory='1MiB', "
        "forward='lean', calibrate=False, tensor_parallel_size=2)\n"
        "app.load_target(dataclasses.replace(settings, tensor_parallel_size=1))\n"
        "try: app.open_ranks(settings)\n"
        "except ConfigError as error: print(error.message)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].endswith("install outrider[ray]")


def alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
