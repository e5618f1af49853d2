"""Who begins, who waits and who is refused; nobody starves and nothing is lost."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from coordinator.admission import Admission, AdmissionLimits
from outrider.errors import InvalidRequestError, OverloadedError


class House:
    """An admission and the requests that a test sends it, by name."""

    def __init__(self, room: int = 2, **limits: float) -> None:
        self.room = room
        self.admission = Admission(AdmissionLimits(**limits), lambda: self.room)  # type: ignore[arg-type]  # whole numbers
        self.begun: list[str] = []
        self.refused: dict[str, OverloadedError] = {}
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(
        self, name: str, tenant: str = "", sessions: int = 1, *, resumed: bool = False
    ) -> None:
        """Send a request and let everybody take note of it."""
        self._ends[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._run(name, tenant, sessions, resumed=resumed))
        await self.settle()

    async def _run(self, name: str, tenant: str, sessions: int, *, resumed: bool) -> None:
        try:
            async with self.admission.admitted(tenant, sessions, resumed=resumed):
                self.begun.append(name)
                await self._ends[name].wait()
        except OverloadedError as error:
            self.refused[name] = error

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await self.settle()

    async def go(self, name: str) -> None:
        """The client of a request goes away."""
        self._tasks[name].cancel()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(8):
            await asyncio.sleep(0)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        assert (self.admission.running, self.admission.queued) == (0, 0)
        assert not self.admission._tenants
        assert not self.admission._new
        assert not self.admission._resumed


@asynccontextmanager
async def house(room: int = 2, **limits: float) -> AsyncIterator[House]:
    made = House(room, **limits)
    try:
        yield made
    finally:
        await made.close()


async def test_requests_wait_for_room_in_their_order() -> None:
    async with house(room=2) as h:
        for name in "abcd":
            await h.ask(name)
        assert h.begun == ["a", "b"]
        assert (h.admission.running, h.admission.queued) == (2, 2)
        await h.end("b")
        assert h.begun == ["a", "b", "c"]
        await h.end("c")
        assert h.begun == ["a", "b", "c", "d"]


async def test_tenants_take_turns() -> None:
    async with house(room=1) as h:
        await h.ask("running", "x")
        for i in range(3):
            await h.ask(f"a{i}", "a")
        await h.ask("b0", "b")
        await h.ask("c0", "c")
        for name in ("running", "a0", "b0", "c0", "a1"):
            await h.end(name)
        assert h.begun == ["running", "a0", "b0", "c0", "a1", "a2"]


async def test_a_request_for_several_is_not_overtaken() -> None:
    async with house(room=3) as h:
        await h.ask("a", "x", 2)
        await h.ask("large", "y", 3)
        # There is room for one, and it is being kept.
        await h.ask("small", "z", 1)
        assert h.begun == ["a"]
        await h.end("a")
        assert h.begun == ["a", "large"]
        await h.end("large")
        assert h.begun == ["a", "large", "small"]


async def test_one_that_goes_makes_way_for_those_behind_it() -> None:
    async with house(room=2) as h:
        await h.ask("a")
        await h.ask("large", sessions=2)
        await h.ask("small")
        await h.go("large")
        assert h.begun == ["a", "small"]


async def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    async with house(room=1, max_queued=2) as h:
        for name in "abc":
            await h.ask(name)
        with pytest.raises(OverloadedError, match="1 sessions run and 2 requests wait"):
            h.admission.check("", 1)
        await h.ask("d")
        assert set(h.refused) == {"d"}
        assert (h.refused["d"].retry_after_s or 0) > 0
        await h.end("a")
        h.admission.check("", 1)


async def test_a_tenant_that_fills_the_queue_makes_room_for_others() -> None:
    async with house(room=1, max_queued=4) as h:
        for i in range(5):
            await h.ask(f"a{i}", "a")
        await h.ask("b0", "b")
        await h.ask("b1", "b")
        assert set(h.refused) == {"a4", "a3"}
        # Now both have two.
        await h.ask("b2", "b")
        await h.ask("a5", "a")
        assert set(h.refused) == {"a4", "a3", "b2", "a5"}
        await h.ask("c0", "c")
        assert len(h.refused) == 5
        for name in ("a0", "a1", "b0", "c0"):
            await h.end(name)
        assert h.begun[:4] == ["a0", "a1", "b0", "c0"]


async def test_without_a_queue_one_is_refused_at_once() -> None:
    async with house(room=1, max_queued=0) as h:
        await h.ask("a")
        await h.ask("b")
        await h.ask("c", resumed=True)
        assert h.begun == ["a"]
        assert set(h.refused) == {"b", "c"}


async def test_a_wait_in_vain_ends() -> None:
    async with house(room=1, queue_wait_s=0.05) as h:
        await h.ask("a")
        await h.ask("b")
        await asyncio.wait([h._tasks["b"]])
        assert "no room within 0.05 s" in h.refused["b"].message
        assert h.admission.queued == 0


async def test_those_who_are_resumed_go_first() -> None:
    async with house(room=1, max_queued=3) as h:
        await h.ask("a")
        await h.ask("new1")
        await h.ask("new2", "other")
        await h.ask("back1", resumed=True)
        await h.ask("back2", resumed=True)  # in the place of somebody new
        assert len(h.refused) == 1
        assert set(h.refused) <= {"new1", "new2"}
        await h.end("a")
        await h.end("back1")
        assert h.begun == ["a", "back1", "back2"]


async def test_those_who_are_taken_over_here_are_not_waited_for() -> None:
    async with house(room=1) as h:
        await h.ask("a")
        await h.ask("b")
        async with h.admission.admitted("", 1, resumed=True, running=True):
            assert h.admission.running == 2
            await h.end("a")
            assert h.begun == ["a"]
        await h.settle()
        assert h.begun == ["a", "b"]


async def test_the_limit_of_a_tenant_binds_that_tenant_alone() -> None:
    async with house(room=8, tenant_sessions=2) as h:
        for i in range(4):
            await h.ask(f"a{i}", "a")
        await h.ask("b0", "b")
        assert h.begun == ["a0", "a1", "b0"]
        await h.end("a0")
        assert h.begun == ["a0", "a1", "b0", "a2"]
        with pytest.raises(InvalidRequestError, match="3 completions"):
            h.admission.check("c", 3)


async def test_what_can_never_fit_is_refused_and_a_limit_of_its_own_counts() -> None:
    async with house(room=8, max_sessions=3) as h:
        await h.ask("large", sessions=4)
        assert "3 fit in all" in h.refused["large"].message
        await h.ask("a", sessions=3)
        await h.ask("b")
        assert h.begun == ["a"]


async def test_what_is_resumed_and_can_never_fit_begins_with_as_much_as_can() -> None:
    async with house(room=3, tenant_sessions=2) as h:
        await h.ask("a")
        await h.ask("large", sessions=4, tenant="x", resumed=True)
        # As much as its tenant may have.
        assert h.begun == ["a", "large"]
        assert h.admission.running == 3
        await h.end("large")
        assert h.admission.running == 1
    async with house(room=3) as h:
        await h.ask("a")
        await h.ask("large", sessions=4, resumed=True)
        await h.ask("b")
        await h.ask("more", resumed=True)
        # It is not overtaken, and takes all that there is.
        assert h.begun == ["a"]
        await h.end("a")
        assert h.begun == ["a", "large"]
        assert h.admission.running == 3
        await h.end("large")
        assert h.begun == ["a", "large", "more", "b"]


async def test_room_that_comes_is_used_and_what_no_longer_fits_blocks_nobody() -> None:
    async with house(room=4) as h:
        await h.ask("a", sessions=4)
        await h.ask("large", "x", sessions=3)
        await h.ask("small", "y")
        h.room = 2
        await h.end("a")
        assert h.begun == ["a", "small"]
        h.room = 4
        h.admission.look()
        await h.settle()
        assert h.begun == ["a", "small", "large"]


async def test_while_no_worker_is_up_a_queueful_may_wait_for_one() -> None:
    async with house(room=0, max_queued=2) as h:
        for name in "abcde":
            await h.ask(name)
        assert h.begun == ["a", "b"]
        assert set(h.refused) == {"e"}


@pytest.mark.parametrize("seed", range(6))
async def test_nothing_is_lost_and_nobody_starves(seed: int) -> None:
    """Requests that come, end and go at random: the limits hold, and everybody is served."""
    chance = random.Random(seed)
    async with house(room=3, max_queued=6, tenant_sessions=2) as h:
        size: Counter[str] = Counter()
        gone: set[str] = set()

        def running() -> list[str]:
            return [n for n in h.begun if not h._ends[n].is_set() and n not in gone]

        for number in range(300):
            match chance.random():
                case roll if roll < 0.5:
                    name = f"{chance.choice('abc')}{number}"
                    size[name] = chance.choice((1, 1, 2))
                    await h.ask(name, name[0], size[name], resumed=chance.random() < 0.2)
                case roll if roll < 0.85 and running():
                    await h.end(chance.choice(running()))
                case _ if h._tasks:
                    name = chance.choice(list(h._tasks))
                    if not h._tasks[name].done():
                        gone.add(name)
                        await h.go(name)
            held = Counter(n[0] for n in running() for _ in range(size[n]))
            assert h.admission.running == held.total() <= 3
            assert all(count <= 2 for count in held.values())
            assert h.admission.queued <= 6
        for _ in range(100):
            for name in running():
                await h.end(name)
        asked = set(h._tasks) - gone - set(h.refused)
        assert asked == set(h.begun) - gone
