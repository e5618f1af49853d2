"""The connection of ranks; the two ranks are two threads of this process."""

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch.distributed import FileStore

from outrider.errors import RankLostError
from outrider.model.parallel.group import Limits, RankGroup, open_store
from outrider.model.parallel.wires import Wires

_Result = TypeVar("_Result")
_SIZE = 3


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> list[RankGroup]:
    return joined(tmp_path_factory.mktemp("group") / "store", Limits())


def joined(store: Path, limits: Limits) -> list[RankGroup]:
    def join(rank: int) -> RankGroup:
        return RankGroup.join(FileStore(str(store), _SIZE), rank, _SIZE, limits=limits)

    with ThreadPoolExecutor(_SIZE) as threads:
        return list(threads.map(join, range(_SIZE)))


def everywhere(groups: list[RankGroup], call: Callable[[RankGroup], _Result]) -> list[_Result]:
    """What every rank gets of a call that all make."""
    with ThreadPoolExecutor(_SIZE) as threads:
        return list(threads.map(call, groups))


def test_a_total_is_the_sum_on_every_rank(groups: list[RankGroup]) -> None:
    for total in everywhere(
        groups, lambda group: group.total(torch.full((2, 2), group.rank + 1.0))
    ):
        assert torch.equal(total, torch.full((2, 2), 6.0))


def test_sums_in_half_precision(groups: list[RankGroup]) -> None:
    ones = torch.ones(8, dtype=torch.bfloat16)
    for total in everywhere(groups, lambda group: group.total(ones.clone())):
        assert torch.equal(total, 3 * ones)


def test_only_rank_0_gets_what_is_gathered(groups: list[RankGroup]) -> None:
    # A view with gaps: what is sent is what it shows.
    first, *others = everywhere(
        groups, lambda group: group.gather(torch.arange(6).view(2, 3)[:, 1:] * 10**group.rank)
    )
    assert first is not None
    assert [part.tolist() for part in first] == [
        [[1 * by, 2 * by], [4 * by, 5 * by]] for by in (1, 10, 100)
    ]
    assert others == [None, None]


@pytest.mark.parametrize("size", [0, 1, 1000, 3_000_000])
def test_messages_of_any_size(groups: list[RankGroup], size: int) -> None:
    message = bytes(i % 251 for i in range(size))

    def exchange(group: RankGroup) -> bytes:
        if group.rank:
            return group.receive()
        group.send(message)
        return message

    assert everywhere(groups, exchange) == [message] * _SIZE


def test_reports_come_to_rank_0(groups: list[RankGroup]) -> None:
    found = everywhere(groups, lambda group: group.collect(b"r" * 1000 * group.rank))
    assert found == [[b"", b"r" * 1000, b"r" * 2000], None, None]
    with pytest.raises(ValueError, match="5000 bytes"):
        groups[0].collect(b"r" * 5000)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_who_does_not_know_the_secret_is_no_rank(tmp_path: Path, address: str) -> None:
    store = FileStore(str(tmp_path / "store"), 2)

    def stranger_then_rank() -> Wires:
        host, port, _ = store.get("messages").decode().rsplit(" ", 2)
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(b"x" * 16)
            assert stranger.recv(1) == b""
        return Wires.meet(store, 1, 2, address, 30.0)

    with ThreadPoolExecutor(2) as threads:
        leading = threads.submit(Wires.meet, store, 0, 2, address, 30.0)
        own = threads.submit(stranger_then_rank).result()
        leading.result().send(b"hello", 30.0)
    assert own.receive(30.0) == b"hello"


def test_meeting(groups: list[RankGroup]) -> None:
    everywhere(groups, RankGroup.meet)
    assert not any(group.failed for group in groups)


def test_a_rank_that_is_waited_for_too_long_fails_the_group(tmp_path: Path) -> None:
    first, second, _ = joined(tmp_path / "store", Limits(step_s=0.2))
    with pytest.raises(RankLostError, match="rank 0 of 3 lost another one"):
        first.meet()
    with pytest.raises(RankLostError, match="out of step"):
        first.total(torch.ones(1))
    # Its connections are closed: the others learn of it without waiting for their limit.
    with pytest.raises(RankLostError):
        second.receive()


def test_a_rank_may_be_late_while_all_start(tmp_path: Path) -> None:
    groups = joined(tmp_path / "store", Limits(start_s=30.0, step_s=0.2))
    late = threading.Event()

    def together(group: RankGroup) -> tuple[float, list[float] | None]:
        with group.watched(starting=True):
            if group.rank == 2:
                late.wait(20)
            total = float(group.total(torch.ones(1)))
            parts = group.gather(torch.ones(1))
        return total, parts and [float(part) for part in parts]

    with ThreadPoolExecutor(_SIZE) as threads:
        waiting = [threads.submit(together, group) for group in groups]
        # More than `step_s`, in which none has given up.
        assert wait(waiting, timeout=0.5).done == set()
        late.set()
        assert [found.result() for found in waiting] == [(3, [1, 1, 1]), (3, None), (3, None)]
        # And it was only for then: long before `start_s` a rank that is alone gives up.
        lost = threads.submit(groups[1].total, torch.ones(1))
        with pytest.raises(RankLostError, match="rank 1 of 3 lost another one"):
            lost.result(timeout=15)
    for group in groups:
        group.fail("the test is over")  # closes its connections


def test_ranks_meet_over_tcp() -> None:
    place = open_store("127.0.0.1", 0, 2, leads=True, limits=Limits())

    def join(rank: int) -> RankGroup:
        own = place
        if rank:
            own = open_store("127.0.0.1", place.port, 2, leads=False, limits=Limits())
        return RankGroup.join(own, rank, 2)

    with ThreadPoolExecutor(2) as threads:
        pair = list(threads.map(join, range(2)))
        totals = list(threads.map(lambda group: group.total(torch.ones(1)), pair))
    assert [float(total) for total in totals] == [2.0, 2.0]


def test_nobody_at_the_meeting_place() -> None:
    place = open_store("127.0.0.1", 0, 2, leads=True, limits=Limits())
    with pytest.raises(RankLostError, match=f"can't listen at 127.0.0.1:{place.port}"):
        open_store("127.0.0.1", place.port, 2, leads=True, limits=Limits())
    port = place.port
    del place
    with pytest.raises(RankLostError, match=f"found nobody at 127.0.0.1:{port}"):
        open_store("127.0.0.1", port, 2, leads=False, limits=Limits(start_s=0.5))


def test_a_rank_that_never_comes_is_named_in_time(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), 2)
    with pytest.raises(RankLostError, match=r"rank 0 of 2 did not meet all others within 0\.5 s"):
        RankGroup.join(store, 0, 2, limits=Limits(start_s=0.5))
