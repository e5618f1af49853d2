"""What one client is told about a request that it follows: started, pieces, how each sample ended.

Following and running are two things. A session runs as `coordinator.session` says; a client that
comes back, to any coordinator, follows it from where it lost it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from opentelemetry import trace

from coordinator import replies
from coordinator.commit import Piece
from coordinator.samples import Samples
from coordinator.session import RunningSession
from coordinator.sessions import ClientGoneError
from outrider.messages import FinishReason
from outrider.pb.v1 import coordinator_pb2

Write: TypeAlias = Callable[[coordinator_pb2.GenerateResponse], Awaitable[None]]


class Follower:
    """Writes to one client; `arrived` is when its call came, on the monotonic clock.

    `offsets` counts the tokens that the client has of each sample. They are not sent, also when
    they have to be made again. A client that leaves a message unread for `unread_s`, and all that
    fits in between, counts as gone: it may resume.
    """

    def __init__(
        self,
        write: Write,
        *,
        arrived: float,
        span: trace.Span,
        unread_s: float,
        offsets: Sequence[int] = (),
    ) -> None:
        self.begun = False
        self._write_one = write
        self._arrived = arrived
        self._span = span
        self._unread_s = unread_s
        self._offsets = offsets
        # grpc takes one message at a time, and samples write as they come.
        self._lock = asyncio.Lock()

    async def follow(self, samples: Samples) -> None:
        """Say all of it; the errors are those of `Samples.run`."""
        first = samples.started[0].journal
        prompt = first.token_ids[: first.record.prompt_len]
        await self._write(replies.started(first.record, prompt))
        await samples.run(self._emit, self._ended)

    async def _emit(self, index: int, offset: int, pieces: list[Piece]) -> None:
        have = self._offsets[index] if index < len(self._offsets) else 0
        if offset < have:
            pieces, offset = pieces[have - offset :], have
        if pieces:
            await self._write(replies.delta(index, offset, pieces))

    async def _ended(self, index: int, session: RunningSession, reason: FinishReason) -> None:
        _describe_end(self._span, index, session, reason)
        now = time.monotonic()
        first_token_at = session.first_token_at or now
        await self._write(
            replies.finished(
                index,
                session.commit,
                reason,
                first_token_s=first_token_at - self._arrived,
                total_s=now - self._arrived,
            )
        )

    async def _write(self, response: coordinator_pb2.GenerateResponse) -> None:
        async with self._lock:
            self.begun = True
            try:
                async with asyncio.timeout(self._unread_s):
                    await self._write_one(response)
            except TimeoutError as error:
                raise ClientGoneError(f"nothing was read for {self._unread_s:g} s") from error
            except Exception as error:  # grpc has many ways to say it, some before it knows why
                raise ClientGoneError(f"a write failed: {error!r}") from error


def describe_call(span: trace.Span, samples: Samples) -> None:
    """Say on the span of a call what it is about."""
    record = samples.started[0].journal.record
    span.set_attributes(
        {
            "outrider.session_id": record.session_id,
            "outrider.prompt_tokens": record.prompt_len,
            "outrider.samples": record.samples,
            "outrider.speculation": record.speculation.enabled,
            "outrider.rule": record.speculation.rule.value,
        }
    )


def _describe_end(
    span: trace.Span, index: int, session: RunningSession, reason: FinishReason
) -> None:
    """The first sample describes the call itself; the others add an event each."""
    figures = session.commit.figures
    attributes = {
        "outrider.finish_reason": reason.value,
        "outrider.completion_tokens": len(session.commit.token_ids),
        "outrider.draft_tokens": figures.draft_tokens,
        "outrider.accepted_tokens": figures.accepted_tokens,
    }
    if index == 0:
        span.set_attributes(attributes)
    else:
        span.add_event("outrider.sample", {"outrider.index": index, **attributes})
