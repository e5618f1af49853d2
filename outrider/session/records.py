"""The record and the token log of each session.

    outrider:{sid}:session   hash: what was asked, seed, owner, epoch, placement, state, finish
    outrider:{sid}:tokens    the log: prompt and completion ids, packed little-endian uint32

Both carry one hash tag, so that each script touches one slot. A write names the epoch under
which its writer owns the session, and an append the length that it continues; a write that
does not fit is refused, so two coordinators can never both extend a session. The log is the
truth: with the record it is all that is needed to go on.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from outrider.errors import FencedError, SessionExistsError, UnknownSessionError
from outrider.messages import (
    FinishReason,
    LogprobOptions,
    SamplingParams,
    SpeculationOptions,
)
from outrider.session import parameters
from outrider.session.identity import ModelIdentity
from outrider.session.redis import Redis, Script, Value

TOKEN_BYTES = 4

CREATE = Script(
    """
if redis.call('EXISTS', KEYS[1]) == 1 then
  return 'exists'
end
redis.call('HSET', KEYS[1], unpack(ARGV, 3))
redis.call('SET', KEYS[2], ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[1])
return 'ok'
"""
)
# What every write to an existing session checks first; ARGV[1] is the writer's epoch.
_OWNED = """
local epoch, state = unpack(redis.call('HMGET', KEYS[1], 'epoch', 'state'))
if not epoch then
  return {'unknown', ''}
end
if epoch ~= ARGV[1] then
  return {'epoch', epoch}
end
"""
_RUNNING = (
    _OWNED
    + """
if state ~= 'running' then
  return {'state', state}
end
"""
)
APPEND = Script(
    _RUNNING
    + """
local length = redis.call('STRLEN', KEYS[2]) / 4
if length ~= tonumber(ARGV[2]) then
  return {'base_len', tostring(length)}
end
redis.call('APPEND', KEYS[2], ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('PEXPIRE', KEYS[2], ARGV[4])
return {'ok', ''}
"""
)
SET_FIELDS = Script(
    _RUNNING
    + """
redis.call('HSET', KEYS[1], unpack(ARGV, 2))
return {'ok', ''}
"""
)
FINISH = Script(
    _OWNED
    + """
redis.call('HSET', KEYS[1], 'state', 'finished', 'finish_reason', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return {'ok', ''}
"""
)


class SessionState(Enum):
    """Whether more may come."""

    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    """One session as Redis knows it; with the token log, all that is needed to go on.

    `owner` is the coordinator that runs it. `target` is what the session is decoded with, wherever
    it is placed; None before its first placement. `prompt_len` and `max_tokens` count tokens;
    `stop` are strings, `stop_ids` the client's own ids. `ignore_eos`: the model's own
    end-of-sequence ids do not end it. `include_stop`: its text keeps the stop string.
    """

    session_id: str
    owner: str
    model: str
    prompt_len: int
    sampling: SamplingParams
    max_tokens: int
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]
    speculation: SpeculationOptions
    ignore_eos: bool = False
    include_stop: bool = False
    logprobs: LogprobOptions | None = None
    epoch: int = 1
    target: ModelIdentity | None = None
    verify_worker_id: str = ""
    draft_worker_id: str = ""
    state: SessionState = SessionState.RUNNING
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Position:
    """How far a session has come in Redis; `length` counts the tokens of the log."""

    owner: str
    epoch: int
    length: int
    state: SessionState


class SessionRecords:
    """Writes and reads session records.

    Every method raises `RecordsUnavailableError` when Redis does not answer; a write may
    then have been carried out or not, and `position` tells. A running session that nobody
    writes to expires after `running_ttl_s`, a finished one after `finished_ttl_s`.
    """

    def __init__(
        self, redis: Redis, *, running_ttl_s: float = 86_400.0, finished_ttl_s: float = 3_600.0
    ) -> None:
        self._redis = redis
        self._running_ms = int(running_ttl_s * 1000)
        self._finished_ms = int(finished_ttl_s * 1000)

    async def create(self, record: SessionRecord, token_ids: Sequence[int]) -> None:
        """Write a new session with the tokens that it has so far, prompt first.

        Raises:
            SessionExistsError: the id is in use.
        """
        fields = [word for pair in _to_hash(record).items() for word in pair]
        args: list[Value] = [self._running_ms, pack_tokens(token_ids), *fields]
        reply = await self._redis.run(CREATE, _keys(record.session_id), args)
        if reply != b"ok":
            raise SessionExistsError(
                f"session {record.session_id!r} exists already; choose another id"
            )

    async def append(
        self, session_id: str, *, epoch: int, base_len: int, token_ids: Sequence[int]
    ) -> None:
        """Add tokens to the log of a running session; `base_len` is the log's length before.

        Raises:
            UnknownSessionError: there is no such session.
            FencedError: the record has another epoch, or the log another length.
        """
        args: list[Value] = [epoch, base_len, pack_tokens(token_ids), self._running_ms]
        reply = await self._redis.run(APPEND, _keys(session_id), args)
        _check(session_id, reply, epoch, base_len)

    async def raise_epoch(
        self,
        session_id: str,
        *,
        held: int,
        epoch: int,
        owner: str,
        target: ModelIdentity | None,
        verify_worker_id: str,
        draft_worker_id: str,
    ) -> None:
        """Own a running session under a higher `epoch`; `held` is the one in the record.

        Raises:
            UnknownSessionError: there is no such session.
            FencedError: the record has another epoch than `held`.
        """
        if epoch <= held:
            raise FencedError(f"epoch {epoch} of session {session_id} is not above {held}")
        fields: dict[str, str | int] = {
            "epoch": epoch,
            "owner": owner,
            **_target_to_hash(target),
            "verify_worker_id": verify_worker_id,
            "draft_worker_id": draft_worker_id,
        }
        await self._set(session_id, held, fields)

    async def assign(self, session_id: str, *, epoch: int, draft_worker_id: str) -> None:
        """Note another draft worker ("" for none) of a running session.

        Raises:
            UnknownSessionError: there is no such session.
            FencedError: the record has another epoch.
        """
        await self._set(session_id, epoch, {"draft_worker_id": draft_worker_id})

    async def finish(self, session_id: str, *, epoch: int, reason: FinishReason) -> None:
        """Mark a session as finished; saying it twice is the same as once.

        Raises:
            UnknownSessionError: there is no such session.
            FencedError: the record has another epoch.
        """
        args: list[Value] = [epoch, reason.value, self._finished_ms]
        _check(session_id, await self._redis.run(FINISH, _keys(session_id), args), epoch)

    async def read(self, session_id: str) -> tuple[SessionRecord, list[int]]:
        """The record and every committed token, prompt first, as of one moment.

        Raises:
            UnknownSessionError: there is no such session.
        """
        session_key, tokens_key = _keys(session_id)
        fields, log = await self._redis.transaction([("HGETALL", session_key), ("GET", tokens_key)])
        if not fields:
            raise _unknown(session_id)
        return _from_hash(session_id, fields), unpack_tokens(log or b"")

    async def position(self, session_id: str) -> Position | None:
        """How far the session has come; None when there is no such session."""
        session_key, tokens_key = _keys(session_id)
        (owner, epoch, state), size = await self._redis.transaction(
            [("HMGET", session_key, "owner", "epoch", "state"), ("STRLEN", tokens_key)]
        )
        if epoch is None:
            return None
        length = size // TOKEN_BYTES
        return Position(owner.decode(), int(epoch), length, SessionState(state.decode()))

    async def _set(self, session_id: str, epoch: int, fields: dict[str, str | int]) -> None:
        words = [word for pair in fields.items() for word in pair]
        reply = await self._redis.run(SET_FIELDS, _keys(session_id), [epoch, *words])
        _check(session_id, reply, epoch)


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def unpack_tokens(log: bytes) -> list[int]:
    """The inverse of `pack_tokens`."""
    return list(struct.unpack(f"<{len(log) // TOKEN_BYTES}I", log))


def _keys(session_id: str) -> tuple[str, str]:
    return f"outrider:{{{session_id}}}:session", f"outrider:{{{session_id}}}:tokens"


def _unknown(session_id: str) -> UnknownSessionError:
    return UnknownSessionError(f"there is no session {session_id!r}, or it has expired")


def _check(
    session_id: str, reply: Sequence[bytes], epoch: int, base_len: int | None = None
) -> None:
    verdict, found = (word.decode() for word in reply)
    match verdict:
        case "ok":
            return
        case "unknown":
            raise _unknown(session_id)
        case "epoch":
            raise FencedError(f"session {session_id} is at epoch {found}, not {epoch}")
        case "base_len":
            raise FencedError(
                f"the log of session {session_id} has {found} tokens; "
                f"an append at base_len {base_len} does not continue it"
            )
        case _:
            raise FencedError(f"session {session_id} is {found}; nothing more may be written")


def _to_hash(record: SessionRecord) -> dict[str, str | int]:
    asked = {
        **parameters.sampling_to_dict(record.sampling),
        **parameters.speculation_to_dict(record.speculation),
        **parameters.logprobs_to_dict(record.logprobs),
        "max_tokens": record.max_tokens,
        "stop": record.stop,
        "stop_ids": record.stop_ids,
        "ignore_eos": record.ignore_eos,
        "include_stop": record.include_stop,
    }
    return {
        "owner": record.owner,
        "model": record.model,
        **_target_to_hash(record.target),
        "prompt_len": record.prompt_len,
        "seed": record.sampling.seed,
        "parameters": parameters.to_json(asked),
        "epoch": record.epoch,
        "verify_worker_id": record.verify_worker_id,
        "draft_worker_id": record.draft_worker_id,
        "state": record.state.value,
        "finish_reason": record.finish_reason.value if record.finish_reason else "",
    }


def _target_to_hash(target: ModelIdentity | None) -> dict[str, str]:
    return {
        "model_fingerprint": target.fingerprint if target else "",
        "dtype": target.dtype if target else "",
        "numerics": target.numerics if target else "",
    }


def _target_from_hash(fields: dict[str, str]) -> ModelIdentity | None:
    if not fields.get("dtype"):
        return None  # not placed yet, or by an earlier version
    return ModelIdentity(fields["model_fingerprint"], fields["dtype"], fields["numerics"])


def _from_hash(session_id: str, reply: Any) -> SessionRecord:
    items = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
    fields = {key.decode(): value.decode() for key, value in items}
    asked = json.loads(fields["parameters"])
    finish = fields["finish_reason"]
    return SessionRecord(
        session_id=session_id,
        owner=fields["owner"],
        model=fields["model"],
        prompt_len=int(fields["prompt_len"]),
        sampling=parameters.sampling_from_dict(asked, int(fields["seed"])),
        max_tokens=asked["max_tokens"],
        stop=tuple(asked["stop"]),
        stop_ids=tuple(asked["stop_ids"]),
        speculation=parameters.speculation_from_dict(asked),
        ignore_eos=asked.get("ignore_eos", False),
        include_stop=asked.get("include_stop", False),
        logprobs=parameters.logprobs_from_dict(asked),
        epoch=int(fields["epoch"]),
        target=_target_from_hash(fields),
        verify_worker_id=fields["verify_worker_id"],
        draft_worker_id=fields["draft_worker_id"],
        state=SessionState(fields["state"]),
        finish_reason=FinishReason(finish) if finish else None,
    )
