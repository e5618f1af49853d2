"""One session as Redis knows it: the record as a value, and as the hash that it is kept in."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

from outrider.errors import OutriderError, from_reason
from outrider.figures import SpeculationFigures
from outrider.messages import (
    FinishReason,
    LogprobOptions,
    SamplingParams,
    SpeculationOptions,
    TokenLogprobs,
)
from outrider.session import parameters
from outrider.session.identity import ModelIdentity
from outrider.session.names import sample_id

# (role, content)
ChatMessage: TypeAlias = tuple[str, str]


class SessionState(Enum):
    """What may still come of a session.

    A session that is running has an owner, and a client that follows it. One that is paused has
    neither: nothing is computed until somebody resumes it.
    """

    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a session ended with an error: `reason` is the word of `outrider.errors`."""

    reason: str
    message: str

    @property
    def error(self) -> OutriderError:
        """The error itself."""
        return from_reason(self.reason, self.message)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    """One session as Redis knows it; with the token log, all that is needed to go on.

    `owner` is the coordinator that runs it, or ran it last. `target` is what the session is
    decoded with, wherever it is placed; None before its first placement. `prompt_len` and
    `max_tokens` count tokens; `stop` are strings, `stop_ids` the client's own ids. `ignore_eos`:
    the model's own end-of-sequence ids do not end it. `include_stop`: its text keeps the stop
    string.

    `tenant` is whose session it is. `idempotency_key` and `digest` are those of the request, which
    says that a later one is the same. `samples` completions belong to the request, of which this is
    the first; 1 for the others. `messages` is the conversation of a chat prompt. `prompt_text` is
    what is sent back with the prompt's ids when the client wants that, else None.
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
    tenant: str = ""
    idempotency_key: str = ""
    digest: str = ""
    samples: int = 1
    messages: tuple[ChatMessage, ...] = ()
    prompt_text: str | None = None
    epoch: int = 1
    target: ModelIdentity | None = None
    verify_worker_id: str = ""
    draft_worker_id: str = ""
    state: SessionState = SessionState.RUNNING
    finish_reason: FinishReason | None = None
    failure: Failure | None = None

    @property
    def sample_ids(self) -> tuple[str, ...]:
        """The sessions of the request, if this is its first."""
        return tuple(sample_id(self.session_id, index) for index in range(self.samples))


@dataclass(frozen=True, slots=True)
class StoredSession:
    """All that Redis has of a session, as of one moment.

    `token_ids` are prompt and completion; `logprobs` has one entry for each token of the
    completion if they are wanted, else none. `figures` are as of the last append, and
    `cached_tokens` of the prompt did not have to be computed.
    """

    record: SessionRecord
    token_ids: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    figures: SpeculationFigures = field(default_factory=SpeculationFigures)
    cached_tokens: int = 0


Fields: TypeAlias = dict[str, str | int]


def record_to_hash(record: SessionRecord) -> Fields:
    """The fields of a record."""
    asked = {
        **parameters.sampling_to_dict(record.sampling),
        **parameters.speculation_to_dict(record.speculation),
        **parameters.logprobs_to_dict(record.logprobs),
        "max_tokens": record.max_tokens,
        "stop": record.stop,
        "stop_ids": record.stop_ids,
        "ignore_eos": record.ignore_eos,
        "include_stop": record.include_stop,
        "samples": record.samples,
        "messages": record.messages,
        "prompt_text": record.prompt_text,
    }
    return {
        "owner": record.owner,
        "tenant": record.tenant,
        "model": record.model,
        "prompt_len": record.prompt_len,
        "seed": record.sampling.seed,
        "parameters": parameters.to_json(asked),
        "idempotency_key": record.idempotency_key,
        "digest": record.digest,
        "epoch": record.epoch,
        "state": record.state.value,
        **placement_to_hash(record),
        **ending_to_hash(record),
    }


def placement_to_hash(record: SessionRecord) -> Fields:
    """Where the session is, and what it is decoded with."""
    target = record.target
    return {
        "model_fingerprint": target.fingerprint if target else "",
        "dtype": target.dtype if target else "",
        "numerics": target.numerics if target else "",
        "verify_worker_id": record.verify_worker_id,
        "draft_worker_id": record.draft_worker_id,
    }


def ending_to_hash(record: SessionRecord) -> Fields:
    """Why the session ended, if it has."""
    return {
        "finish_reason": record.finish_reason.value if record.finish_reason else "",
        "error_reason": record.failure.reason if record.failure else "",
        "error_message": record.failure.message if record.failure else "",
    }


def figures_to_hash(figures: SpeculationFigures, cached_tokens: int) -> Fields:
    """What a session has counted."""
    return {"figures": pack_figures(figures, cached_tokens)}


def pack_figures(figures: SpeculationFigures, cached_tokens: int) -> str:
    """What a session has counted, as the field `figures`."""
    counts = (
        f"{cached_tokens} {figures.rounds} {figures.drafts} {figures.draft_tokens} "
        f"{figures.accepted_tokens}"
    )
    if not figures.accepted_per_position:
        return counts
    return " ".join([counts, *map(str, figures.accepted_per_position)])


def stored_from_hash(
    session_id: str,
    fields: Mapping[str, str],
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
) -> StoredSession:
    """All of a session, from the fields of its record and its logs."""
    counts = [int(word) for word in fields.get("figures", "").split()] or [0] * 5
    cached_tokens, rounds, drafts, draft_tokens, accepted_tokens, *per_position = counts
    return StoredSession(
        record_from_hash(session_id, fields),
        list(token_ids),
        list(logprobs),
        SpeculationFigures(rounds, drafts, draft_tokens, accepted_tokens, per_position),
        cached_tokens,
    )


def record_from_hash(session_id: str, fields: Mapping[str, str]) -> SessionRecord:
    """The inverse of `record_to_hash`."""
    asked = json.loads(fields["parameters"])
    finish = fields["finish_reason"]
    failed = fields["error_reason"]
    return SessionRecord(
        session_id=session_id,
        owner=fields["owner"],
        tenant=fields["tenant"],
        model=fields["model"],
        prompt_len=int(fields["prompt_len"]),
        sampling=parameters.sampling_from_dict(asked, int(fields["seed"])),
        max_tokens=asked["max_tokens"],
        stop=tuple(asked["stop"]),
        stop_ids=tuple(asked["stop_ids"]),
        speculation=parameters.speculation_from_dict(asked),
        ignore_eos=asked["ignore_eos"],
        include_stop=asked["include_stop"],
        logprobs=parameters.logprobs_from_dict(asked),
        samples=asked["samples"],
        messages=tuple((role, content) for role, content in asked["messages"]),
        prompt_text=asked["prompt_text"],
        idempotency_key=fields["idempotency_key"],
        digest=fields["digest"],
        epoch=int(fields["epoch"]),
        target=_target(fields),
        verify_worker_id=fields["verify_worker_id"],
        draft_worker_id=fields["draft_worker_id"],
        state=SessionState(fields["state"]),
        finish_reason=FinishReason(finish) if finish else None,
        failure=Failure(failed, fields["error_message"]) if failed else None,
    )


def pairs(reply: Any) -> dict[str, str]:
    """A hash reply as a dict, whichever form the protocol version gives it."""
    items = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
    return {key.decode(): value.decode() for key, value in items}


def _target(fields: Mapping[str, str]) -> ModelIdentity | None:
    if not fields["dtype"]:
        return None  # not placed yet
    return ModelIdentity(fields["model_fingerprint"], fields["dtype"], fields["numerics"])
