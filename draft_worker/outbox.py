"""Events on their way from the engine's thread to one stream."""

import asyncio
from collections.abc import Sequence

from outrider.errors import OutriderError, OverloadedError
from outrider.messages import DraftEvent

# A verify worker that lets this many events lie is not reading any more.
MAX_EVENTS = 10_000


class Outbox:
    """Collects events until the stream takes them, all at once, as one frame.

    It holds at most `max_events`; one more closes it with an error, so that a peer that
    does not read costs its own stream and no memory.
    """

    def __init__(self, *, max_events: int = MAX_EVENTS) -> None:
        self._loop = asyncio.get_running_loop()
        self._max_events = max_events
        self._events: list[DraftEvent] = []
        self._changed = asyncio.Event()
        self._closed = False
        self.error: OutriderError | None = None

    def put(self, events: Sequence[DraftEvent]) -> None:
        """Add events; in the event loop's thread."""
        if self._closed:
            return
        if len(self._events) + len(events) > self._max_events:
            self.close(OverloadedError("the stream's proposals are not read; it was ended"))
            return
        self._events.extend(events)
        self._changed.set()

    def put_threadsafe(self, events: Sequence[DraftEvent]) -> None:
        """Add events from any thread."""
        try:
            self._loop.call_soon_threadsafe(self.put, events)
        except RuntimeError:
            # The loop has ended, and the stream with it.
            return

    def close(self, error: OutriderError | None = None) -> None:
        """Take no more; `take` gives what is left and then nothing."""
        if not self._closed:
            self._closed = True
            self.error = error
            self._changed.set()

    async def take(self) -> list[DraftEvent]:
        """Everything collected, as soon as there is something; empty once closed."""
        await self._changed.wait()
        events, self._events = self._events, []
        if not self._closed:
            self._changed.clear()
        return events
