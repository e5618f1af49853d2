"""Calls of a journal that are lost, late or doubled, and a Redis that forgets."""

from collections.abc import Iterator

import pytest
import redis
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coordinator.journal import Journal
from outrider.errors import FencedError
from outrider.messages import FinishReason
from outrider.session.names import session_keys
from outrider.session.redis import ScriptCall
from tests.support.journals import CALLS, Server, extend, journal, place
from tests.support.valkey import new_valkey


@pytest.fixture(scope="module")
def valkey() -> Iterator["redis.Redis"]:
    with new_valkey() as server, redis.Redis.from_url(server.connection_url) as client:
        yield client


STEPS = (
    "extend",
    "place",
    "assign",
    "write",
    "lost before",
    "lost after",
    "delay",
    "late",
    "empty",
    "sweep",
)


class Troubles:
    """What can happen to the calls of a journal; `late` are those that are still on their way."""

    def __init__(self, server: Server, ours: Journal) -> None:
        self.late: list[ScriptCall] = []
        self._server = server
        self._ours = ours

    def step(self, step: str, number: int) -> None:
        server, ours = self._server, self._ours
        match step:
            case "extend":
                extend(ours, number + 3)
            case "place":
                place(ours)
            case "assign":
                ours.assign(f"d{number}")
            case "late" if self.late:
                server.run(self.late.pop(0))
            case "empty":
                server.client.flushall()
            case "sweep":
                server.client.delete(session_keys("s")[3])
                server.run(CALLS.pause_orphan("s"))
            case "write" | "lost before" | "lost after" | "delay":
                # With a lease to be renewed it is not the short write that tokens alone are.
                self._send(step, renew=number % 2 == 0)

    def settle(self) -> None:
        """All that is late is carried out, then all that is due."""
        while self.late:
            self._server.run(self.late.pop(0))
        self._send("write", renew=True)
        self._server.write(self._ours)

    def _send(self, how: str, *, renew: bool) -> None:
        call = self._ours.due(renew=renew)
        if call is None:
            return
        if how == "write":
            self._ours.answered(self._server.run(call))
            return
        if how == "lost after":
            self._server.run(call)
        if how == "delay":
            self.late.append(call)
        self._ours.doubt()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(STEPS), max_size=25), st.sampled_from(["", "pause", "finish"]))
@example(["write", "extend", "delay", "write", "late", "extend", "write", "late"], "finish")
def test_nothing_is_lost_or_doubled_whatever_happens_on_the_way(
    valkey: "redis.Redis", steps: list[str], end: str
) -> None:
    valkey.flushall()
    server, ours = Server(valkey), journal()
    server.write(ours)
    troubles = Troubles(server, ours)
    for number, step in enumerate(steps):
        troubles.step(step, number)
    if end == "pause":
        ours.pause()
    elif end == "finish":
        ours.finish(FinishReason.STOP)
    troubles.settle()
    assert ours.lost is None
    server.check(ours)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(STEPS[:8]), max_size=15), st.integers(0, 15))
def test_a_former_owner_changes_nothing(
    valkey: "redis.Redis", steps: list[str], taken_at: int
) -> None:
    valkey.flushall()
    server, ours = Server(valkey), journal()
    server.write(ours)
    troubles = Troubles(server, ours)
    for number, step in enumerate(steps[:taken_at]):
        troubles.step(step, number)
    server.run(CALLS.take_over("s", owner="c2", tenant=""))
    taken = server.read()
    for number, step in enumerate(steps[taken_at:], taken_at):
        troubles.step(step, number)
    troubles.settle()
    assert isinstance(ours.lost, FencedError)
    assert server.read() == taken
