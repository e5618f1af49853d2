"""Generate requests: what is refused, the defaults, and the prompt as token ids."""

import asyncio
import hashlib
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.commit import Limits
from coordinator.conversation import Previous
from coordinator.limits import MAX_SAMPLES, check_sizes
from coordinator.model import ServedModel
from coordinator.parameters import check_ids, read_logprobs, read_sampling
from coordinator.speculation import resolve_speculation
from outrider.errors import InvalidRequestError, UnknownModelError
from outrider.messages import LogprobOptions, SamplingParams, SpeculationOptions
from outrider.pb.v1 import coordinator_pb2
from outrider.session.names import may_be_sample_id
from outrider.session.policy import Policy
from outrider.session.record import ChatMessage

MAX_KEY_CHARS = 128
# Longer prompts are tokenized in a thread, so that other sessions do not wait for them.
THREAD_CHARS = 4096

_SESSION_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A request that can be served; the prompt is never empty.

    `stop_ids` are the client's own. `prompt_text` is None unless it is to be sent back.
    `samples` completions of the prompt are wanted. `messages` is the whole conversation that a
    chat prompt was made of. `idempotency_key` with `digest` says that a later request is the same.
    """

    session_id: str
    prompt: tuple[int, ...]
    limits: Limits
    sampling: SamplingParams
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]
    speculation: SpeculationOptions
    ignore_eos: bool = False
    include_stop: bool = False
    logprobs: LogprobOptions | None = None
    prompt_text: str | None = None
    samples: int = 1
    tenant: str = ""
    messages: tuple[ChatMessage, ...] = ()
    idempotency_key: str = ""
    digest: str = ""


async def read_request(
    request: coordinator_pb2.GenerateRequest,
    model: ServedModel,
    policy: Policy,
    *,
    trusted_drafts: bool,
    tenant: str = "",
    previous: Previous | None = None,
) -> GenerateCall:
    """The request with its defaults filled in: greedy, everything up to the context.

    `policy` decides what the request leaves open about speculation; `trusted_drafts` says
    whether the rejection rule can be exact now. `previous` is the session that the request
    continues.

    Raises:
        InvalidRequestError: it can't be served; the message says why.
        ConfigError: it asks for a rule that would not be exact here.
        UnknownModelError: it asks for a model that is not served.
    """
    check_sizes(request, model)
    if request.model not in ("", model.name):
        raise UnknownModelError(
            f"model {request.model!r} is not served here; served: {model.name!r}"
        )
    if request.session_id and not _SESSION_ID.fullmatch(request.session_id):
        raise InvalidRequestError(
            f"session_id {request.session_id[:140]!r} must be 1 to 128 characters of "
            "A-Z a-z 0-9 . _ : -"
        )
    if may_be_sample_id(request.session_id):
        raise InvalidRequestError(
            f"session_id {request.session_id!r} must not end in a dot and a number: such ids are "
            "those of the further completions of a request"
        )
    if len(request.idempotency_key) > MAX_KEY_CHARS:
        raise InvalidRequestError(f"idempotency_key must be at most {MAX_KEY_CHARS} characters")
    if request.idempotency_key and not request.session_id:
        raise InvalidRequestError("an idempotency_key needs a session_id beside it")
    if request.n > MAX_SAMPLES:
        raise InvalidRequestError(f"n must be at most {MAX_SAMPLES}, not {request.n}")
    if request.HasField("max_tokens") and request.max_tokens < 1:
        raise InvalidRequestError("max_tokens must be at least 1")
    stop = _stop_strings(request)
    check_ids("stop_token_ids", request.stop_token_ids, model)
    speculation = resolve_speculation(request.speculation, policy, trusted_drafts=trusted_drafts)
    logprobs = read_logprobs(request, model)
    messages = _messages(request, previous)
    prompt = await _prompt(request, model, messages, previous)
    if len(prompt) >= model.context_len:
        raise InvalidRequestError(
            f"the prompt has {len(prompt)} tokens, and {model.name} takes {model.context_len} "
            "tokens of prompt and completion together; shorten the prompt"
        )
    max_tokens = request.max_tokens if request.HasField("max_tokens") else model.context_len
    limits = Limits(len(prompt), max_tokens, model.context_len)
    stop_ids = tuple(request.stop_token_ids)
    sampling = read_sampling(
        request,
        model,
        stop_ids=ending_ids(model, stop_ids, ignore_eos=request.ignore_eos),
        max_new_tokens=limits.max_new_tokens,
    )
    return GenerateCall(
        session_id=request.session_id or uuid.uuid4().hex,
        prompt=tuple(prompt),
        limits=limits,
        sampling=sampling,
        stop=stop,
        stop_ids=stop_ids,
        speculation=speculation,
        ignore_eos=request.ignore_eos,
        include_stop=request.include_stop,
        logprobs=logprobs,
        prompt_text=_prompt_text(request, prompt, model) if request.echo else None,
        samples=max(request.n, 1),
        tenant=tenant,
        messages=messages,
        idempotency_key=request.idempotency_key,
        digest=digest_of(request) if request.idempotency_key else "",
    )


def digest_of(request: coordinator_pb2.GenerateRequest) -> str:
    """The same for requests that ask for the same, whatever their idempotency key."""
    plain = coordinator_pb2.GenerateRequest()
    plain.CopyFrom(request)
    plain.ClearField("idempotency_key")
    words = plain.SerializeToString(deterministic=True)
    return hashlib.blake2b(words, digest_size=16).hexdigest()


def ending_ids(
    model: ServedModel, stop_ids: tuple[int, ...], *, ignore_eos: bool
) -> frozenset[int]:
    """The ids that end a completion: the client's, and the model's own unless ignored."""
    return frozenset(stop_ids) if ignore_eos else model.stop_ids | frozenset(stop_ids)


def _stop_strings(request: coordinator_pb2.GenerateRequest) -> tuple[str, ...]:
    if "" in request.stop:
        raise InvalidRequestError("a stop string must not be empty")
    return tuple(request.stop)


def _messages(
    request: coordinator_pb2.GenerateRequest, previous: Previous | None
) -> tuple[ChatMessage, ...]:
    """The whole conversation, if the prompt is one."""
    if request.WhichOneof("prompt") != "messages":
        return ()
    messages = tuple((message.role, message.content) for message in request.messages.messages)
    if not messages:
        raise InvalidRequestError("messages must not be empty")
    return previous.conversation(messages) if previous else messages


async def _prompt(
    request: coordinator_pb2.GenerateRequest,
    model: ServedModel,
    messages: Sequence[ChatMessage],
    previous: Previous | None,
) -> list[int]:
    tokenizer = model.tokenizer
    match request.WhichOneof("prompt"):
        case "token_ids":
            prompt = list(request.token_ids.ids)
            check_ids("prompt token ids", prompt, model)
        case "text":
            encode = tokenizer.encode if previous is None else model.encode_plain
            if len(request.text) > THREAD_CHARS:
                prompt = list(await asyncio.to_thread(encode, request.text))
            else:
                prompt = list(encode(request.text))
        case "messages":
            said = [{"role": role, "content": content} for role, content in messages]
            # A template is a program; it also runs in a thread.
            prompt = await asyncio.to_thread(tokenizer.apply_chat_template, said)
        case _:
            raise InvalidRequestError("a prompt is needed: text, token_ids or messages")
    if not prompt:
        raise InvalidRequestError("the prompt is empty; give at least one token")
    if previous is not None and not messages:
        return [*previous.token_ids, *prompt]
    return prompt


def _prompt_text(
    request: coordinator_pb2.GenerateRequest, prompt: list[int], model: ServedModel
) -> str:
    """The prompt as it was given, or what its ids say, with the template's special tokens."""
    given = request.WhichOneof("prompt") == "text" and not request.previous_session_id
    return request.text if given else model.show(prompt)
