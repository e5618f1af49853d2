"""What goes to the connection of the ranks, and what of it is waiting.

Ranks on one machine have one clock (CLOCK_MONOTONIC, `time.perf_counter` on Linux). Each notes
when it comes to a collective; all come to the same ones in the same order. So of two ranks

    rank 0   ---- here |  waits  | sums | goes on
    rank 1   ------------------- here   | goes on

the last to come begins the sum: until then rank 0 waits, and the rest is the sum itself.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import sharedctypes
from typing import Any

from outrider.model.parallel.group import RankGroup
from outrider.model.parallel.member import Answer, Member
from outrider.model.parallel.messages import Order

# Arrivals that are kept of each rank; a step has some hundred at most.
_KEPT = 4096


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective on rank 0: seconds until all were there, and of what came then."""

    waited_s: float
    summed_s: float

    @classmethod
    def of(cls, came_s: float, left_s: float, others_s: Sequence[float]) -> "Collective":
        """From when rank 0 came and left, and when the others came, on one clock."""
        # One that is a hair late in noting it can't have come after rank 0 had left.
        began_s = min(max(came_s, *others_s), left_s)
        return cls(began_s - came_s, left_s - began_s)


class Arrivals:
    """When each rank came to its last collectives; shared by the processes of all ranks."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        # Without a lock: each rank writes to places of its own, before rank 0 reads them.
        self._times = sharedctypes.RawArray("d", ranks * _KEPT)

    def note(self, rank: int, number: int, now_s: float) -> None:
        """The rank comes to its collective of that number."""
        self._times[rank * _KEPT + number % _KEPT] = now_s

    def of_others(self, number: int) -> list[float]:
        """When all ranks but 0 came to it; they have."""
        return [self._times[rank * _KEPT + number % _KEPT] for rank in range(1, self.ranks)]

    def watched(self, note_left: Callable[[int, float, float], None] | None = None) -> Any:
        """A `RankGroup._wait` that notes arrivals; to be put in its place before ranks join.

        `note_left` gets the number, and when this rank came and left.
        """
        wait: Any = RankGroup._wait
        count = 0

        def noted(group: RankGroup, start: Callable[[], Any]) -> None:
            nonlocal count
            number, count = count, count + 1
            came_s = time.perf_counter()
            self.note(group.rank, number, came_s)
            wait(group, start)
            if note_left is not None:
                note_left(number, came_s, time.perf_counter())

        return noted


@dataclass(slots=True)
class Spent:
    """Seconds and bytes on rank 0, by what they were for, since the last `clear`."""

    arrivals: Arrivals
    seconds: dict[str, float] = field(default_factory=dict)
    messages: list[bytes] = field(default_factory=list)
    left: list[tuple[int, float, float]] = field(default_factory=list)
    ran_s: float = 0.0

    def clear(self) -> None:
        """Begin anew."""
        self.seconds.clear()
        self.messages.clear()
        self.left.clear()
        self.ran_s = 0.0

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, its time added up."""

        def wrapped(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                spent = time.perf_counter() - began
                self.seconds[name] = self.seconds.get(name, 0.0) + spent

        return wrapped

    def watch(self, group: RankGroup) -> None:
        """Time what is sent in the group, and keep the messages."""
        send = self.timed("send", group.send)

        def kept(message: bytes) -> None:
            self.messages.append(message)
            send(message)

        untyped: Any = group
        untyped.send = kept

    def watch_runs(self, member: Member) -> None:
        """Time its part of steps, from the message on to the answer."""
        run = member.run

        def timed(order: Order) -> Answer | None:
            began_s = time.perf_counter()
            try:
                return run(order)
            finally:
                self.ran_s += time.perf_counter() - began_s

        untyped: Any = member
        untyped.run = timed

    @property
    def computed_s(self) -> float:
        """Seconds in which rank 0 ran its part of steps and was in no collective."""
        return self.ran_s - sum(left_s - came_s for _, came_s, left_s in self.left)

    def note_left(self, number: int, came_s: float, left_s: float) -> None:
        """For `Arrivals.watched` on rank 0."""
        self.left.append((number, came_s, left_s))

    def collectives(self) -> list[Collective]:
        """Those of rank 0, in order."""
        return [
            Collective.of(came_s, left_s, self.arrivals.of_others(number))
            for number, came_s, left_s in self.left
        ]
