"""Decode streams: who is connected, and the way of an event from the engine to its stream."""

import asyncio
import itertools
from collections.abc import Sequence

from outrider import logs, wire
from outrider.messages import DecodeEvent
from outrider.pb.v1 import verify_pb2
from verify_worker.draft_links import DraftLinks
from verify_worker.state import LeaveDrafter, Output, ToCoordinator, ToDrafter

_LOG = logs.get(__name__)
# More than a coordinator that reads ever leaves lying.
MOST_EVENTS = 10_000


class Streams:
    """The open Decode streams by their number; use it from the event loop only."""

    def __init__(self) -> None:
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

    async def next_frame(self, number: int) -> verify_pb2.DecodeResponse | None:
        """Wait for events and give all that there are; None at the end of the stream."""
        queue = self._queues.get(number)
        if queue is None:
            return None
        events = [await queue.get()]
        while events[-1] is not None and not queue.empty():
            events.append(queue.get_nowait())
        if events[-1] is None:
            # The end again, for the next call, after what came before it.
            queue.put_nowait(None)
            events.pop()
        if not events:
            return None
        frame = [wire.decode_event_to_pb(event) for event in events if event is not None]
        return verify_pb2.DecodeResponse(events=frame)


def deliver(outputs: Sequence[Output], streams: Streams, links: DraftLinks) -> None:
    """Hand what the engine gave out to the streams; runs in the event loop."""
    for output in outputs:
        match output:
            case ToCoordinator(owner, event):
                streams.put(owner, event)
            case ToDrafter(worker, command):
                links.send(worker, command)
            case LeaveDrafter(worker_id):
                links.leave(worker_id)
