"""Decode streams: who is connected, and the way of an event from the engine to its stream."""

import asyncio
import itertools
from collections.abc import Callable, Sequence

from outrider import logs, wire
from outrider.messages import DecodeEvent, Heartbeat
from outrider.pb.v1 import verify_pb2
from verify_worker.draft_links import DraftLinks
from verify_worker.state import LeaveDrafter, Output, ToCoordinator, ToDrafter

_LOG = logs.get(__name__)
# More than a coordinator that reads ever leaves lying.
MOST_EVENTS = 10_000
# A stream on which nothing happens says so this often.
HEARTBEAT_S = 0.5


class Streams:
    """The open Decode streams by their number; use it from the event loop only.

    `heartbeat` gives what every frame says of the worker.
    """

    def __init__(self, heartbeat: Callable[[], Heartbeat] = Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._numbers = itertools.count(1)
        self._queues: dict[int, asyncio.Queue[DecodeEvent | None]] = {}

    def open(self) -> int:
        """A number for a new stream."""
        number = next(self._numbers)
        self._queues[number] = asyncio.Queue()
        return number

    def close(self, number: int) -> None:
        """Forget a stream; events for it are dropped from now on."""
        self._queues.pop(number, None)

    def end(self, number: int) -> None:
        """Let a stream end after what is queued for it."""
        if number in self._queues:
            self._queues[number].put_nowait(None)

    def end_all(self) -> None:
        """Let every stream end after what is queued for it."""
        for number in self._queues:
            self.end(number)

    def put(self, number: int, event: DecodeEvent) -> None:
        """Queue an event for a stream, if it is still there."""
        queue = self._queues.get(number)
        if queue is None:
            return
        if queue.qsize() < MOST_EVENTS:
            queue.put_nowait(event)
            return
        _LOG.warning("a coordinator reads no events; its stream ends", stream=number)
        self.close(number)
        # What is queued goes with it: without its gaps it would be of no use.
        while not queue.empty():
            queue.get_nowait()
        queue.put_nowait(None)

    def frame(self, events: Sequence[DecodeEvent] = ()) -> verify_pb2.DecodeResponse:
        """A frame of events, with how the worker is."""
        return verify_pb2.DecodeResponse(
            events=[wire.decode_event_to_pb(event) for event in events],
            heartbeat=wire.heartbeat_to_pb(self._heartbeat()),
        )

    async def next_frame(self, number: int) -> verify_pb2.DecodeResponse | None:
        """All events that there are, waiting for one for `HEARTBEAT_S`; None at the end."""
        queue = self._queues.get(number)
        if queue is None:
            return None
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                event = await queue.get()
        except TimeoutError:
            return self.frame()
        events: list[DecodeEvent] = []
        while event is not None:
            events.append(event)
            if queue.empty():
                return self.frame(events)
            event = queue.get_nowait()
        # The end again, for the next call, after what came before it.
        queue.put_nowait(None)
        return self.frame(events) if events else None


def deliver(outputs: Sequence[Output], streams: Streams, links: DraftLinks) -> None:
    """Hand what the engine gave out to the streams; runs in the event loop."""
    # Drafts are waited for: they are asked for first.
    for output in outputs:
        match output:
            case ToDrafter(worker, command):
                links.send(worker, command)
            case LeaveDrafter(worker_id):
                links.leave(worker_id)
    for output in outputs:
        if isinstance(output, ToCoordinator):
            streams.put(output.owner, output.event)
