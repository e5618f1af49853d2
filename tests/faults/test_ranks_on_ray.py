"""Verify workers whose ranks are Ray actors: lost, refused, and ended with the worker."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import pytest_asyncio
import torch

from bench.cluster import Cluster, Size
from bench.mid_step_worker import LOST, hit_in_mid_step
from bench.ray_nodes import all_taken, events, placed, two_nodes
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
    with two_nodes(spare=1) as address:
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


async def sessions_on(client: AsyncClient, name: str) -> int:
    workers = (await client.status()).workers
    return sum(worker.sessions for worker in workers if worker.worker_id == name)


async def busy(client: AsyncClient) -> bool:
    return await sessions_on(client, SPLIT) > 0


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
    told = await refusal(address=ray_address, strategy="spread", cpus=2, start_s=1.0)
    assert "too few resources for 2 ranks of 2 CPU each on the cluster" in told
    with all_taken(ray_address):
        # As a stranger: that one is connected from this process.
        told = await asyncio.to_thread(crowded, ray_address)
    assert "no room for 2 ranks of 1 CPU each on the cluster within 1 s" in told
    assert "no Ray at 127.0.0.1:9: " in await refusal(address="127.0.0.1:9")
    assert "is not HOST:PORT" in await refusal(address="ray://there")


async def test_nodes_that_join_later_are_waited_for(
    ray_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_of_them, seen = ray_group.ray.nodes, []

    def nodes() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = all_of_them()
        here = ray_group.ray.get_runtime_context().get_node_id()
        seen.append(len(found))
        return [node for node in found if len(seen) > 2 or node["NodeID"] == here]

    monkeypatch.setattr(ray_group.ray, "nodes", nodes)

    def place() -> torch.device:
        ranks = RayRanks.connect(
            ray_group.Cluster(size=2, address=ray_address, strategy="spread", start_s=60.0)
        )
        try:
            return ranks.place()
        finally:
            ranks.close()

    assert await asyncio.to_thread(place) == torch.device("cpu")
    assert len(seen) == 3


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

    # It asks for a token, which Ray tells the children of this process by its environment.
    with mock.patch.dict(os.environ):
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


@dataclass(frozen=True)
class Stack:
    """A worker over both nodes, one that is whole, and what is said while nothing breaks.

    `fault` is where the split worker looks in the midst of its steps, as `bench.mid_step_worker`.
    """

    cluster: Cluster
    client: AsyncClient
    expected: Sequence[Completion]
    fault: Path

    @property
    def log(self) -> Path:
        """Of the split worker."""
        return self.cluster.run_dir / f"{SPLIT}.log"

    async def incarnation(self) -> str:
        """Of the split worker when it is up and takes sessions; "" while it does not."""
        for worker in (await self.client.status()).workers:
            if worker.worker_id == SPLIT and worker.connected and not worker.draining:
                return worker.incarnation
        return ""

    async def is_up(self) -> bool:
        """Whether coordinators use the split worker."""
        return await self.incarnation() != ""

    async def is_gone(self) -> bool:
        """Whether they don't."""
        return not await self.is_up()

    async def finish_under(self, fault: Callable[[], None]) -> None:
        """Sessions are on the split worker when it comes; it is gone for them, and they go on."""
        running = [asyncio.create_task(say(self.client, number)) for number in range(SESSIONS)]
        await until(lambda: busy(self.client), "sessions on the split worker")
        fault()
        await until(self.is_gone, "coordinators take it for gone")
        said = await asyncio.gather(*running)
        # Unchanged, and drafts had a part in it.
        assert [c.token_ids for c in said] == [c.token_ids for c in self.expected]
        assert all(len(completion.token_ids) == NEW for completion in said)
        assert sum(c.speculation.accepted_tokens for c in said) > NEW

    async def lose_group(self, fault: Callable[[], None]) -> None:
        """The same, and the worker comes back by itself, as another one."""
        before = await self.incarnation()
        lost = len(events(self.log, "the ranks start anew"))
        await self.finish_under(fault)

        async def back() -> bool:
            assert self.cluster.process(SPLIT).running
            return await self.incarnation() not in ("", before)

        await until(back, "the split worker is back")
        assert len(events(self.log, "the ranks start anew")) == lost + 1

    async def serves(self) -> bool:
        """Whether sessions came to the split worker, too; all say what they have to say."""
        again = [asyncio.create_task(say(self.client, number)) for number in range(SESSIONS)]
        used = False
        while not all(task.done() for task in again):
            used = used or await busy(self.client)
            await asyncio.sleep(0.01)
        assert [task.result().token_ids for task in again] == [c.token_ids for c in self.expected]
        return used


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(
    ray_address: str, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stack]:
    split = ("--tensor-parallel-size", "2", "--ray-address", ray_address)
    spread = ("--ray-strategy", "spread", "--rank-timeout-s", "2")
    settings = StackSettings(
        model=str(model),
        threads=1,
        k="fixed:3",
        verify_flags=("--forward", "lean", "--kv-memory", "4MiB", "--no-calibrate"),
    )
    fault = tmp_path_factory.mktemp("fault") / "fault"
    pace = "0.03"
    cluster = Cluster(
        settings,
        size=Size(coordinators=1, draft_workers=1),
        stand_ins={
            SPLIT: ("bench.mid_step_worker", pace, str(fault), *split, *spread),
            WHOLE: ("bench.paced_worker", pace),
        },
    )
    async with cluster, AsyncClient(cluster.addresses) as client:
        expected = await asyncio.gather(*(say(client, number) for number in range(SESSIONS)))
        yield Stack(cluster, client, expected, fault)


def actors() -> list[psutil.Process]:
    """The processes of Ray that hold a rank or a place, on both nodes."""
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if alive(process) and "Actor" in " ".join(process.cmdline())
    ]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_sessions_go_on_when_a_rank_is_killed_or_stopped_in_mid_step(
    stack: Stack, fault: signal.Signals
) -> None:
    first, second = placed(stack.log)
    assert first.node != second.node
    before = len(events(stack.log, LOST))
    await stack.lose_group(partial(hit_in_mid_step, stack.fault, second.pid, fault))
    assert not stack.fault.exists()
    assert not psutil.pid_exists(second.pid)
    # It had the step's message and had been at its first sum: it was lost in the second.
    (lost,) = events(stack.log, LOST)[before:]
    assert lost["collective"] == 2


@pytest.mark.asyncio(loop_scope="module")
async def test_sessions_go_on_when_rank_0_is_stopped_and_later_may_go_on(stack: Stack) -> None:
    await stack.finish_under(lambda: stack.cluster.pause(SPLIT))
    stack.cluster.go_on(SPLIT)
    await until(stack.is_up, "the split worker is back")


@pytest.mark.asyncio(loop_scope="module")
async def test_sessions_go_on_when_rank_0_is_killed_and_nothing_is_left_of_the_group(
    stack: Stack,
) -> None:
    worker = stack.cluster.process(SPLIT)
    assert len(actors()) == 2
    await stack.finish_under(partial(os.kill, worker.pid, signal.SIGKILL))
    assert await worker.wait() == -signal.SIGKILL
    await until(lambda: not actors(), "nothing of the group is left")
    await stack.cluster.start_process(SPLIT)
    await until(stack.is_up, "the next one is there")


@pytest.mark.asyncio(loop_scope="module")
async def test_sessions_go_on_when_a_node_is_gone_and_the_group_comes_back_on_another(
    stack: Stack,
) -> None:
    lost = placed(stack.log)[1]
    raylet = psutil.Process(lost.pid).parent()
    assert raylet is not None
    assert raylet.name() == "raylet"
    node = [raylet, *raylet.children(recursive=True)]

    def lose_node() -> None:
        for process in node:
            process.kill()

    await stack.lose_group(lose_node)
    assert not any(map(alive, node))
    assert placed(stack.log)[1].node not in {lost.node, placed(stack.log)[0].node}
    # The last group serves as the first, and ends in order.
    await until(stack.serves, "a session on the new group")
    assert await stack.cluster.drain(SPLIT) == 0
    await until(lambda: not actors(), "nothing of it is left")
