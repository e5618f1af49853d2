"""The record and the logs of each session in Redis.

    outrider:{sid}:session    hash: what was asked, seed, owner, epoch, placement, state, finish
    outrider:{sid}:tokens     the log: prompt and completion ids, packed little-endian uint32
    outrider:{sid}:logprobs   beside the log, when they were asked for
    outrider:{sid}:lease      the owner's name, for as long as it renews it

All carry one hash tag, so that each script touches one slot. A write names the owner and the
epoch under which its writer holds the session, and an append the length that it continues; a
write that does not fit is refused, so two coordinators can never both extend a session. The
lease takes no part in that: it only says who seems to be gone. The log is the truth: with the
record it is all that is needed to go on.
"""

from collections.abc import Sequence
from typing import Any

from outrider.errors import FencedError
from outrider.figures import SpeculationFigures
from outrider.messages import FinishReason, TokenLogprobs
from outrider.session import record_calls as calls
from outrider.session.identity import ModelIdentity
from outrider.session.names import session_keys
from outrider.session.packing import unpack_logprobs, unpack_tokens
from outrider.session.record import (
    Failure,
    Fields,
    SessionRecord,
    SessionState,
    StoredSession,
    figures_to_hash,
    pairs,
    stored_from_hash,
)
from outrider.session.record_calls import Lifetimes, Position, RecordCalls, Update
from outrider.session.redis import Redis, ScriptCall


class SessionRecords:
    """Writes and reads session records.

    Every method raises `RecordsUnavailableError` when Redis does not answer; a write may
    then have been carried out or not, and `position` tells. Every write to a running session,
    `append` too, renews its lease and its time to live.
    """

    def __init__(self, redis: Redis, lifetimes: Lifetimes | None = None) -> None:
        self.calls = RecordCalls(lifetimes)
        self._redis = redis

    async def create(
        self,
        record: SessionRecord,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> None:
        """Write a new session with the tokens that it has so far, prompt first.

        Raises:
            SessionExistsError: the id is in use.
        """
        call = self.calls.create(record, token_ids, logprobs)
        calls.check_created(record.session_id, await self._run(call))

    async def update(self, session_id: str, update: Update) -> None:
        """Write to a session that is held.

        Raises:
            UnknownSessionError: there is no such session.
            FencedError: it has another owner or epoch, its log another length, or it has finished.
        """
        reply = await self._run(self.calls.update(session_id, update))
        calls.check_updated(session_id, reply, update)

    async def append(
        self,
        session_id: str,
        *,
        owner: str,
        epoch: int,
        base_len: int,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> None:
        """Add tokens to the log of a running session; `base_len` is the log's length before.

        Raises as `update`.
        """
        await self.update(
            session_id,
            Update(
                owner=owner,
                epoch=epoch,
                base_len=base_len,
                token_ids=token_ids,
                logprobs=logprobs,
            ),
        )

    async def raise_epoch(
        self,
        session_id: str,
        *,
        owner: str,
        held: int,
        epoch: int,
        target: ModelIdentity | None,
        verify_worker_id: str,
        draft_worker_id: str,
    ) -> None:
        """Place a session that is held under the epoch `held` anew, under a higher `epoch`.

        Raises as `update`.
        """
        if epoch <= held:
            raise FencedError(f"epoch {epoch} of session {session_id} is not above {held}")
        fields: Fields = {
            "epoch": epoch,
            "model_fingerprint": target.fingerprint if target else "",
            "dtype": target.dtype if target else "",
            "numerics": target.numerics if target else "",
            "verify_worker_id": verify_worker_id,
            "draft_worker_id": draft_worker_id,
        }
        await self.update(session_id, Update(owner=owner, epoch=held, fields=fields))

    async def pause(self, session_id: str, *, owner: str, epoch: int) -> None:
        """Nobody follows the session any more; saying it twice is the same as once.

        Raises as `update`.
        """
        update = Update(owner=owner, epoch=epoch, state=SessionState.PAUSED)
        await self.update(session_id, update)

    async def finish(
        self,
        session_id: str,
        *,
        owner: str,
        epoch: int,
        reason: FinishReason,
        failure: Failure | None = None,
    ) -> None:
        """Mark a session as finished; saying it twice is the same as once.

        Raises as `update`.
        """
        fields: Fields = {
            "finish_reason": reason.value,
            "error_reason": failure.reason if failure else "",
            "error_message": failure.message if failure else "",
        }
        state = SessionState.FINISHED
        await self.update(session_id, Update(owner=owner, epoch=epoch, state=state, fields=fields))

    async def note_figures(
        self,
        session_id: str,
        *,
        owner: str,
        epoch: int,
        figures: SpeculationFigures,
        cached_tokens: int,
    ) -> None:
        """Note what the session has counted. Raises as `update`."""
        fields = figures_to_hash(figures, cached_tokens)
        await self.update(session_id, Update(owner=owner, epoch=epoch, fields=fields))

    async def take_over(self, session_id: str, *, owner: str, tenant: str = "") -> StoredSession:
        """Own a session whoever runs it, under the next epoch, and read all of it.

        A session that has finished is read as it is.

        Raises:
            UnknownSessionError: the tenant has no such session.
        """
        reply = await self._run(self.calls.take_over(session_id, owner=owner, tenant=tenant))
        return _stored(session_id, reply or (None, None, None))

    async def cancel(self, session_id: str, *, tenant: str = "") -> bool:
        """Finish a session as cancelled, whoever runs it; False when it had finished already.

        Its owner is fenced at its next write.

        Raises:
            UnknownSessionError: the tenant has no such session.
        """
        verdict, _ = await self._run(self.calls.cancel(session_id, tenant=tenant))
        if verdict == b"unknown":
            raise calls.unknown_session(session_id)
        return bool(verdict == b"ok")

    async def read_record(self, session_id: str) -> SessionRecord:
        """The record alone.

        Raises:
            UnknownSessionError: there is no such session.
        """
        fields = await self._redis.command("HGETALL", session_keys(session_id)[0])
        return _stored(session_id, (fields, None, None)).record

    async def count_unfinished(self, session_ids: Sequence[str]) -> int:
        """How many of the sessions have not finished; those that there are none of count too."""
        finished = SessionState.FINISHED.value.encode()
        asked = [("HGET", session_keys(name)[0], "state") for name in session_ids]
        return sum(state != finished for state in await self._redis.batch(asked))

    async def read(self, session_id: str) -> tuple[SessionRecord, list[int]]:
        """The record and every committed token, prompt first, as of one moment.

        Raises:
            UnknownSessionError: there is no such session.
        """
        stored = await self.read_whole(session_id)
        return stored.record, stored.token_ids

    async def read_whole(self, session_id: str) -> StoredSession:
        """All that there is of a session, as of one moment.

        Raises:
            UnknownSessionError: there is no such session.
        """
        record, tokens, logprobs, _ = session_keys(session_id)
        reply = await self._redis.transaction(
            [("HGETALL", record), ("GET", tokens), ("GET", logprobs)]
        )
        return _stored(session_id, reply)

    async def position(self, session_id: str) -> Position | None:
        """How far the session has come; None when there is no such session."""
        return calls.read_position(await self._run(self.calls.position(session_id)))

    async def _run(self, call: ScriptCall) -> Any:
        return await self._redis.run(call.script, call.keys, call.args)


def _stored(session_id: str, reply: Sequence[Any]) -> StoredSession:
    fields, tokens, logprobs = reply
    if not fields:
        raise calls.unknown_session(session_id)
    token_ids = unpack_tokens(tokens or b"")
    return stored_from_hash(session_id, pairs(fields), token_ids, unpack_logprobs(logprobs or b""))


__all__ = [
    "Failure",
    "Lifetimes",
    "Position",
    "SessionRecord",
    "SessionRecords",
    "SessionState",
    "StoredSession",
    "Update",
]
