"""Generate requests: what is refused, the defaults, and the prompt as token ids."""

import asyncio
import math
import re
import secrets
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.commit import Limits
from coordinator.model import ServedModel
from outrider import wire
from outrider.errors import InvalidRequestError, UnknownModelError
from outrider.messages import SamplingParams, SpeculationOptions
from outrider.pb.v1 import coordinator_pb2

MAX_STOP_STRINGS = 16
# Longer prompts are tokenized in a thread, so that other sessions do not wait for them.
THREAD_CHARS = 4096

_SESSION_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A request that can be served; the prompt is never empty."""

    session_id: str
    prompt: tuple[int, ...]
    limits: Limits
    sampling: SamplingParams
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]
    speculation: SpeculationOptions


async def read_request(
    request: coordinator_pb2.GenerateRequest, model: ServedModel
) -> GenerateCall:
    """The request with its defaults filled in: greedy, everything up to the context.

    Raises:
        InvalidRequestError: it can't be served; the message says why.
        UnknownModelError: it asks for a model that is not served.
    """
    if request.model not in ("", model.name):
        raise UnknownModelError(
            f"model {request.model!r} is not served here; served: {model.name!r}"
        )
    if request.session_id and not _SESSION_ID.fullmatch(request.session_id):
        raise InvalidRequestError(
            f"session_id {request.session_id[:140]!r} must be 1 to 128 characters of "
            "A-Z a-z 0-9 . _ : -"
        )
    sampling = _sampling(request)
    stop = _stop_strings(request)
    _check_ids("stop_token_ids", request.stop_token_ids, model)
    if request.HasField("max_tokens") and request.max_tokens < 1:
        raise InvalidRequestError("max_tokens must be at least 1")
    prompt = await _prompt(request, model)
    if len(prompt) >= model.context_len:
        raise InvalidRequestError(
            f"the prompt has {len(prompt)} tokens, and {model.name} takes {model.context_len} "
            "tokens of prompt and completion together; shorten the prompt"
        )
    max_tokens = request.max_tokens if request.HasField("max_tokens") else model.context_len
    return GenerateCall(
        session_id=request.session_id or uuid.uuid4().hex,
        prompt=tuple(prompt),
        limits=Limits(len(prompt), max_tokens, model.context_len),
        sampling=sampling,
        stop=stop,
        stop_ids=tuple(request.stop_token_ids),
        speculation=wire.speculation_from_pb(request.speculation),
    )


def _sampling(request: coordinator_pb2.GenerateRequest) -> SamplingParams:
    temperature = request.temperature if request.HasField("temperature") else 0.0
    top_p = request.top_p if request.HasField("top_p") else 1.0
    if not (math.isfinite(temperature) and temperature >= 0):
        raise InvalidRequestError(f"temperature must be a number from 0 up, not {temperature}")
    if not 0 < top_p <= 1:
        raise InvalidRequestError(f"top_p must be above 0 and at most 1, not {top_p}")
    seed = request.seed if request.HasField("seed") else secrets.randbits(64)
    return SamplingParams(temperature, request.top_k, top_p, seed)


def _stop_strings(request: coordinator_pb2.GenerateRequest) -> tuple[str, ...]:
    if len(request.stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError(
            f"at most {MAX_STOP_STRINGS} stop strings are taken, not {len(request.stop)}"
        )
    if "" in request.stop:
        raise InvalidRequestError("a stop string must not be empty")
    return tuple(request.stop)


async def _prompt(request: coordinator_pb2.GenerateRequest, model: ServedModel) -> list[int]:
    tokenizer = model.tokenizer
    match request.WhichOneof("prompt"):
        case "token_ids":
            prompt = list(request.token_ids.ids)
            _check_ids("prompt token ids", prompt, model)
        case "text":
            if len(request.text) > THREAD_CHARS:
                prompt = await asyncio.to_thread(tokenizer.encode, request.text)
            else:
                prompt = tokenizer.encode(request.text)
        case "messages":
            messages = [
                {"role": message.role, "content": message.content}
                for message in request.messages.messages
            ]
            if not messages:
                raise InvalidRequestError("messages must not be empty")
            # A template is a program; it also runs in a thread.
            prompt = await asyncio.to_thread(tokenizer.apply_chat_template, messages)
        case _:
            raise InvalidRequestError("a prompt is needed: text, token_ids or messages")
    if not prompt:
        raise InvalidRequestError("the prompt is empty; give at least one token")
    return prompt


def _check_ids(what: str, token_ids: Iterable[int], model: ServedModel) -> None:
    for token_id in token_ids:
        if token_id >= model.vocab_size:
            raise InvalidRequestError(
                f"{what}: {token_id} is not within the vocabulary of {model.vocab_size} tokens"
            )
