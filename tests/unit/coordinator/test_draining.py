"""Which sessions are asked to move, before any of them has."""

from types import SimpleNamespace
from typing import Any

from coordinator.draining import move_sessions
from outrider.errors import OverloadedError


class FakePool:
    """One other worker, with so many places and sessions."""

    def __init__(self, *, capacity: int, sessions: int, draining: str = "v1") -> None:
        worker = SimpleNamespace(worker_id="v2", capacity=capacity)
        self.other: Any = SimpleNamespace(worker=worker, sessions=sessions)
        self.draining = draining

    def is_draining(self, worker_id: str) -> bool:
        return worker_id == self.draining

    def choose_link(self, exclude: set[str], target: object) -> object:
        assert exclude == {"v1"}
        if self.other is not None and self.other.sessions >= self.other.worker.capacity:
            raise OverloadedError("all are full")
        return self.other


class FakeSession:
    def __init__(self, worker_id: str) -> None:
        record = SimpleNamespace(verify_worker_id=worker_id, target="t")
        self.journal = SimpleNamespace(record=record)
        self.moves = 0

    def move(self) -> None:
        self.moves += 1


def moved(pool: Any, *worker_ids: str) -> list[int]:
    sessions: list[Any] = [FakeSession(worker_id) for worker_id in worker_ids]
    move_sessions(sessions, pool)
    return [session.moves for session in sessions]


def test_as_many_as_there_is_room_for_although_none_has_arrived_yet() -> None:
    pool = FakePool(capacity=4, sessions=2)
    assert moved(pool, "v1", "v1", "v1", "v1") == [1, 1, 0, 0]


def test_only_those_of_the_worker_that_drains() -> None:
    assert moved(FakePool(capacity=9, sessions=0), "v2", "v1", "v3", "") == [0, 1, 0, 0]


def test_none_where_the_others_are_full_or_there_are_none() -> None:
    assert moved(FakePool(capacity=2, sessions=2), "v1") == [0]
    alone = FakePool(capacity=2, sessions=0)
    alone.other = None
    assert moved(alone, "v1") == [0]
