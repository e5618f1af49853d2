"""Which request has which id at this coordinator, from before it is let in until it is over."""

import asyncio
from typing import Protocol

from outrider.errors import (
    FencedError,
    InvalidRequestError,
    OutriderError,
    SessionExistsError,
)
from outrider.session.record import SessionRecord
from outrider.session.record_calls import unknown_session


class Asked(Protocol):
    """What says which request it is: a call, or the record of its first session."""

    @property
    def session_id(self) -> str:
        """The id of the request, and of its first session."""

    @property
    def tenant(self) -> str:
        """Whose it is."""

    @property
    def idempotency_key(self) -> str:
        """Says with `digest` that a later request is the same; empty for none."""

    @property
    def digest(self) -> str:
        """The same for requests that ask for the same."""


class Request(Protocol):
    """A request that is followed here, or waits for that; all that is known of it."""

    asked: Asked
    # Once all of it has started, or it is known that it will not.
    settled: asyncio.Event
    # Its sessions that were let in.
    places: int

    @property
    def record(self) -> SessionRecord | None:
        """That of its first session, once that is here."""

    @property
    def unfinished(self) -> int:
        """Its sessions that have not ended; only once `record` is there."""

    def cancel(self) -> bool:
        """Cancel all of it; False when nothing was left to cancel."""

    def leave(self, error: OutriderError) -> None:
        """Pause all of it, and tell its client `error`."""


class Claims:
    """The requests of this coordinator by their ids; each takes its own, and releases it."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        """How many there are."""
        return len(self._requests)

    def of(self, session_id: str, tenant: str) -> Request | None:
        """The request of a tenant with the id, if it is here.

        Raises:
            UnknownSessionError: it is another tenant's.
        """
        request = self._requests.get(session_id)
        if request is not None and request.asked.tenant != tenant:
            raise unknown_session(session_id)
        return request

    def take(self, request: Request) -> Request | None:
        """Take the id for a request that is to begin; the very same one, made before, has to leave.

        Gives that one.

        Raises:
            SessionExistsError: another request has the id.
            InvalidRequestError: that one has the key too.
        """
        asked = request.asked
        other = self._requests.get(asked.session_id)
        if other is not None:
            check_same(other.asked, asked)
        return self._replace(other, request)

    def take_over(self, request: Request) -> Request | None:
        """Take the id for a request that resumes it; whoever follows it here has to leave.

        Gives that one.

        Raises:
            UnknownSessionError: it is another tenant's.
        """
        asked = request.asked
        return self._replace(self.of(asked.session_id, asked.tenant), request)

    def release(self, request: Request) -> None:
        """Give up an id that was taken, unless another request has it now."""
        if self._requests.get(request.asked.session_id) is request:
            del self._requests[request.asked.session_id]

    def _replace(self, other: Request | None, request: Request) -> Request | None:
        session_id = request.asked.session_id
        if other is not None:
            other.leave(FencedError(f"session {session_id!r} was resumed by another call"))
        self._requests[session_id] = request
        return other


def check_same(before: Asked, asked: Asked) -> None:
    """Refuse a request whose id is in use, unless it is the very same request again.

    Raises:
        SessionExistsError: the id is another request's.
        InvalidRequestError: it differs from the one with its key.
    """
    key = (asked.tenant, asked.idempotency_key)
    if not asked.idempotency_key or (before.tenant, before.idempotency_key) != key:
        raise SessionExistsError(f"session {asked.session_id!r} exists already; choose another id")
    if before.digest != asked.digest:
        raise InvalidRequestError(
            f"session {asked.session_id!r} was begun with this idempotency_key by another request; "
            "send the same one, or choose another id and key"
        )
