"""The client's side of `coordinator.proto`, without any input or output.

Requests are built from keyword arguments, and short answers become plain values. What a
`Generate` call says is folded together in `outrider._transcript`.
"""

from collections.abc import Mapping, Sequence
from typing import TypedDict

from outrider import wire
from outrider._values import ModelInfo, SessionInfo, Status, WorkerInfo
from outrider.draft_length import AUTO, parse_draft_length
from outrider.errors import ConfigError, InvalidRequestError
from outrider.messages import AcceptanceRule
from outrider.pb.v1 import coordinator_pb2 as pb
from outrider.pb.v1 import types_pb2

LOGPROB_KINDS = ("raw", "processed")


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate`; what is left out is up to the server.

    messages, token_ids: instead of a text prompt; messages are rendered with the model's
        chat template (`{"role": "user", "content": "…"}`).
    max_tokens: most tokens to generate; up to the context limit when left out.
    temperature, top_p, top_k, min_p: temperature 0 (the default) is greedy; top_p 1, top_k 0
        and min_p 0 keep every token.
    repetition_penalty: above 1 makes every id of prompt and completion less likely.
    frequency_penalty, presence_penalty: subtracted for each occurrence in the completion,
        and once for each id that occurs in it.
    logit_bias: added to the logits, by token id.
    bad_words, bad_words_ids: texts and id sequences that never occur; a text also stands for
        itself after a space.
    min_tokens: end-of-sequence and stop ids are barred until there are that many tokens.
    allowed_token_ids, banned_token_ids: nothing else, and never those.
    seed: the same seed gives the same tokens; drawn when left out.
    stop, stop_token_ids: strings and ids that end the completion and are not part of its
        text; with include_stop the stop string is.
    ignore_eos: go on past the model's end-of-sequence tokens.
    logprobs: a number asks for the log-probability of each token and for those of that many
        best ones; True is the same as 0. logprobs_kind: "raw" (the default) is the target's
        own distribution, "processed" the one that the token was chosen from.
    echo: send the prompt back, as text and ids.
    n: so many completions of the prompt, each with its own seed, derived from `seed`.
    speculation: False switches it off; a number is the draft length of each round, "auto" has it
        chosen each round.
    rule: "coupled" or "rejection", how drafts are accepted.
    session_id: an id of your own; made when left out.
    idempotency_key: a word of your own that makes the call safe to be made again, with the same
        session_id and equal options, by another process too: it streams the same session
        from its start. Made when left out, so that the client's own tries are safe.
    previous_session_id: a finished session; its prompt and completion come before the prompt,
        and its messages before the messages.
    model: the model's name, where more than one is served.
    timeout_s: seconds until it fails with `DeadlineError`, however often it is taken up again.
    """

    messages: Sequence[Mapping[str, str]]
    token_ids: Sequence[int]
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float
    repetition_penalty: float | None
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float]
    bad_words: Sequence[str]
    bad_words_ids: Sequence[Sequence[int]]
    min_tokens: int
    allowed_token_ids: Sequence[int]
    banned_token_ids: Sequence[int]
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop: bool
    ignore_eos: bool
    logprobs: bool | int | None
    logprobs_kind: str
    echo: bool
    n: int
    speculation: bool | int | str | None
    rule: str | None
    session_id: str
    idempotency_key: str
    previous_session_id: str
    model: str
    timeout_s: float | None


def generate_request(
    prompt: str | None,
    *,
    session_id: str,
    idempotency_key: str = "",
    previous_session_id: str = "",
    messages: Sequence[Mapping[str, str]] | None = None,
    token_ids: Sequence[int] | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float = 0.0,
    repetition_penalty: float | None = None,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    bad_words: Sequence[str] = (),
    bad_words_ids: Sequence[Sequence[int]] = (),
    min_tokens: int = 0,
    allowed_token_ids: Sequence[int] = (),
    banned_token_ids: Sequence[int] = (),
    seed: int | None = None,
    stop: str | Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    include_stop: bool = False,
    ignore_eos: bool = False,
    logprobs: bool | int | None = None,
    logprobs_kind: str = "raw",
    echo: bool = False,
    n: int = 1,
    speculation: bool | int | str | None = None,
    rule: str | None = None,
    model: str = "",
) -> pb.GenerateRequest:
    """The request that the options mean (see `GenerateOptions`).

    Raises:
        InvalidRequestError: not exactly one kind of prompt, or a value of the wrong kind.
    """
    if sum(given is not None for given in (prompt, messages, token_ids)) != 1:
        raise InvalidRequestError("give exactly one of prompt, messages and token_ids")
    if isinstance(bad_words, str):
        raise InvalidRequestError("bad_words is a list of texts, not one text")
    if n < 1:
        raise InvalidRequestError(f"n must be at least 1, not {n}")
    try:
        biases = (logit_bias or {}).items()
        request = pb.GenerateRequest(
            session_id=session_id,
            idempotency_key=idempotency_key,
            previous_session_id=previous_session_id,
            model=model,
            token_ids=None if token_ids is None else types_pb2.TokenIds(ids=token_ids),
            messages=None if messages is None else _messages_to_pb(messages),
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            logit_bias=[types_pb2.LogitBias(token_id=i, bias=bias) for i, bias in biases],
            bad_words=bad_words,
            bad_words_ids=[types_pb2.TokenIds(ids=word) for word in bad_words_ids],
            min_tokens=min_tokens,
            allowed_token_ids=allowed_token_ids,
            banned_token_ids=banned_token_ids,
            seed=seed,
            stop=[stop] if isinstance(stop, str) else stop,
            stop_token_ids=stop_token_ids,
            include_stop=include_stop,
            ignore_eos=ignore_eos,
            logprobs=_logprobs_to_pb(logprobs, logprobs_kind),
            echo=echo,
            n=n,
            speculation=_speculation_to_pb(speculation, rule),
        )
        if prompt is not None:
            request.text = prompt
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"bad argument of generate: {error}") from error
    return request


def _messages_to_pb(messages: Sequence[Mapping[str, str]]) -> pb.Messages:
    unknown = {key for message in messages for key in message} - {"role", "content"}
    missing = any({"role", "content"} - message.keys() for message in messages)
    if unknown or missing:
        raise InvalidRequestError("a message has a role and a content, and nothing else")
    return pb.Messages(
        messages=[pb.ChatMessage(role=m["role"], content=m["content"]) for m in messages]
    )


def _logprobs_to_pb(logprobs: bool | int | None, kind: str) -> types_pb2.LogprobOptions | None:
    if kind not in LOGPROB_KINDS:
        raise InvalidRequestError(f"logprobs_kind is raw or processed, not {kind!r}")
    if logprobs is None or logprobs is False:
        return None
    top = 0 if logprobs is True else logprobs
    return types_pb2.LogprobOptions(top=top, processed=kind == "processed")


def _speculation_to_pb(
    speculation: bool | int | str | None, rule: str | None
) -> types_pb2.SpeculationOptions | None:
    if speculation is None and rule is None:
        return None
    options = types_pb2.SpeculationOptions()
    if rule is not None:
        known = [known.value for known in AcceptanceRule]
        if rule not in known:
            raise InvalidRequestError(f"rule is one of {', '.join(known)}, not {rule!r}")
        options.rule = wire.RULES[AcceptanceRule(rule)]
    if speculation is not None:
        if isinstance(speculation, str):
            speculation = _draft_length(speculation) or AUTO
        on = bool(speculation)
        options.mode = types_pb2.SPECULATION_MODE_ON if on else types_pb2.SPECULATION_MODE_OFF
        options.auto_draft_len = speculation == AUTO
        options.draft_len = 0 if isinstance(speculation, bool | str) else speculation
    return options


def _draft_length(text: str) -> int:
    try:
        return parse_draft_length(text)
    except ConfigError as error:
        raise InvalidRequestError(error.message) from error


_STATES = {
    pb.SESSION_STATE_RUNNING: "running",
    pb.SESSION_STATE_PAUSED: "paused",
    pb.SESSION_STATE_FINISHED: "finished",
}


def session_from_pb(info: pb.SessionInfo) -> SessionInfo:
    """From the wire."""
    return SessionInfo(
        session_id=info.session_id,
        model=info.model,
        state=_STATES.get(info.state, "unknown"),
        finish_reason=wire.FINISH_REASONS_FROM_PB.get(info.finish_reason),
        epoch=info.epoch,
        prompt_tokens=info.prompt_tokens,
        token_ids=tuple(info.token_ids),
        verify_worker_id=info.verify_worker_id,
        draft_worker_id=info.draft_worker_id,
    )


def models_from_pb(response: pb.ListModelsResponse) -> tuple[ModelInfo, ...]:
    """From the wire."""
    return tuple(ModelInfo(m.name, m.fingerprint, m.context_len) for m in response.models)


def status_from_pb(response: pb.GetStatusResponse) -> Status:
    """From the wire."""
    return Status(
        workers=tuple(_worker_from_pb(worker) for worker in response.workers),
        running_sessions=response.running_sessions,
        finished_sessions=response.finished_sessions,
        completion_tokens=response.completion_tokens,
        speculation=wire.figures_from_pb(response.speculation),
        redis_reachable=response.redis_reachable,
    )


def _worker_from_pb(worker: pb.WorkerInfo) -> WorkerInfo:
    return WorkerInfo(
        pool="verify" if worker.pool == pb.WORKER_POOL_VERIFY else "draft",
        worker_id=worker.worker_id,
        address=worker.address,
        incarnation=worker.incarnation,
        model=worker.model,
        sessions=worker.sessions,
        capacity=worker.capacity,
        draining=worker.draining,
        connected=worker.connected,
        dtype=worker.dtype,
        numerics=worker.numerics,
    )
