"""Waits for a device end when a rank is lost: the device is a pretended one, which stands still."""

import gc
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.errors import RankLostError
from outrider.model.blocks import BlockTable
from outrider.model.parallel.group import Limits, RankGroup
from outrider.model.parallel.member import Member
from outrider.model.parallel.messages import Kind, Order, Wanted
from outrider.model.parallel.shards import load_shard
from outrider.model.parallel.watch import CudaQueue, Mark, Watch
from outrider.model.rows import Segment
from tests.support.models import save_model

LIMIT_S = 0.2
# Of a wait that nothing ends: the test fails then.
BROKEN_S = 60.0


class Place:
    """A mark that the device comes past when it is told to."""

    def __init__(self, device: "Device") -> None:
        self.device = device
        self.passed = not device.lost

    def query(self) -> bool:
        return self.passed or self.device.freed.is_set()


class Device:
    """A device and its connection in one. After a sum with a rank that is `lost` it stands still.

    As with NCCL a sum returns before it is done, and nothing but `abort` ends it.
    """

    def __init__(self, *, lost: bool = True, frees: bool = True) -> None:
        self.lost, self._frees = lost, frees
        self.freed = threading.Event()
        self.aborts = 0
        self.places: list[Place] = []
        self.within = 0

    def entered(self) -> AbstractContextManager[Any]:
        self.within += 1
        return nullcontext()

    def mark(self) -> Mark:
        self.places.append(Place(self))
        return self.places[-1]

    def allreduce(self, *_: Any) -> Any:
        return self

    gather = allreduce

    def wait(self) -> None:
        """Of a sum: it is queued."""

    def abort(self) -> None:
        self.aborts += 1
        if self._frees:
            self.freed.set()

    def copy(self) -> None:
        """What waits for everything that is queued."""
        if self.lost and not self.freed.wait(BROKEN_S):
            raise AssertionError("nothing ended the wait")


def group_on(device: Device) -> RankGroup:
    cpu, limits = torch.device("cpu"), Limits(start_s=2 * LIMIT_S, step_s=LIMIT_S)
    return RankGroup(0, 1, device, device, cpu, limits, queue=device)


def test_a_copy_from_a_device_that_stands_still_ends_as_a_lost_rank() -> None:
    device = Device()
    group = group_on(device)

    def step() -> None:
        with group.watched():
            group.total(torch.ones(2))
            device.copy()

    with pytest.raises(RankLostError, match=r"device stood still for more than 0\.2 s") as caught:
        step()
    # The wait has ended, and has not failed.
    assert caught.value.__cause__ is None
    assert (device.aborts, device.within) == (1, 1)
    with pytest.raises(RankLostError, match="out of step: its device stood still"):
        group.total(torch.ones(2))


@pytest.mark.parametrize("error", [RuntimeError("comm aborted"), IndexError("no such token")])
def test_what_comes_of_an_aborted_step_is_a_lost_rank(error: Exception) -> None:
    device = Device()
    group = group_on(device)

    def step() -> None:
        with group.watched():
            group.total(torch.ones(2))
            device.copy()
            raise error

    with pytest.raises(RankLostError, match="stood still") as caught:
        step()
    assert caught.value.__cause__ is error


def test_leaving_a_step_has_an_end_even_if_nothing_frees_the_device() -> None:
    group = group_on(Device(frees=False))
    with pytest.raises(RankLostError, match="stood still"), group.watched():
        group.total(torch.ones(2))


def test_errors_of_a_device_that_is_well_stay_what_they_are() -> None:
    device = Device(lost=False)
    group = group_on(device)
    with pytest.raises(IndexError), group.watched():
        raise IndexError
    with group.watched():
        assert group.total(torch.ones(2)).tolist() == [1, 1]
        device.copy()
    assert not group.failed
    assert device.aborts == 0


@pytest.mark.parametrize(("kind", "limit_s"), [(Kind.STEP, "0.2"), (Kind.FIRST, "0.4")])
def test_a_step_of_a_rank_is_watched(tmp_path: Path, kind: Kind, limit_s: str) -> None:
    device = Device(lost=False)
    group = group_on(device)
    member = Member.of(load_shard(str(save_model(tmp_path)), group), group, 8, forward="lean")
    table = BlockTable()
    member.paged.pool.grow(table, 3)
    order = Order(kind, [Segment((1, 2, 3), table, 1)], [], Wanted(272, [0]))
    device.lost = True
    with pytest.raises(RankLostError, match=f"stood still for more than {limit_s} s"):
        member.run(order)
    # There is a mark behind every sum of the two layers, the embedding's, and the end.
    assert len(device.places) >= 2 * 2 + 1 + 1


class Watched:
    """A watch whose time is that of the test."""

    def __init__(self, limit_s: float) -> None:
        self.device = Device()
        self.now_s = 0.0
        self.watch = Watch(self.device, self.device.abort, limit_s, lambda: self.now_s)

    def __enter__(self) -> "Watched":
        return self

    def __exit__(self, *_: object) -> None:
        self.watch.close()

    def look_after(self, seconds: float) -> bool:
        self.now_s += seconds
        return self.watch.look()


def test_only_standing_still_counts() -> None:
    with Watched(10.0) as watched:
        assert not watched.look_after(1000)  # it was given nothing
        for _ in range(5):
            watched.watch.mark()
        for place in watched.device.places:
            assert not watched.look_after(9)
            place.passed = True
            assert not watched.look_after(9)  # and now it is at the next
        assert not watched.look_after(1000)
        watched.watch.mark()
        assert not watched.look_after(9.9)
        assert not watched.watch.expired
        assert watched.look_after(0.2)
        assert watched.watch.expired


def test_while_ranks_start_they_have_longer() -> None:
    with Watched(10.0) as watched:
        with watched.watch.over(300.0):
            watched.watch.mark()
            assert not watched.look_after(299)
            watched.device.freed.set()
        # A step that is over leaves nothing behind.
        watched.device.freed.clear()
        assert not watched.look_after(1000)


def test_the_thread_of_a_watch_ends_with_the_group() -> None:
    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "watch"]

    before = set(threads())
    group = group_on(Device(lost=False))
    (own,) = set(threads()) - before
    del group
    gc.collect()
    own.join(BROKEN_S)
    assert not own.is_alive()


def test_marks_are_on_the_device_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[object] = []

    class Event:
        def record(self, stream: object) -> None:
            recorded.append(stream)

    def of_device(kind: str) -> Callable[[torch.device], str]:
        return lambda device: f"{kind} {device}"

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", of_device("stream"))
    monkeypatch.setattr(torch.cuda, "device", of_device("current"))
    queue = CudaQueue(torch.device("cuda", 3))
    queue.mark()
    # Another device is current in a thread that has not set its own.
    assert recorded == ["stream cuda:3"]
    assert str(queue.entered()) == "current cuda:3"
