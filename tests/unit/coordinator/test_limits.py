"""Requests that are far too large, and requests that are nothing at all."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings

from coordinator import limits
from coordinator.limits import check_name, check_offsets
from coordinator.requests import GenerateCall, read_request
from outrider.errors import InvalidRequestError, OutriderError, UnknownModelError
from outrider.pb.v1 import coordinator_pb2 as pb
from outrider.pb.v1 import types_pb2
from outrider.session.policy import Policy
from tests.support.coordinator_stack import MODEL
from tests.support.random_messages import messages


def read(request: pb.GenerateRequest) -> GenerateCall:
    return asyncio.run(read_request(request, MODEL, Policy(), trusted_drafts=True))


def chat(count: int, content: str) -> pb.Messages:
    return pb.Messages(messages=[pb.ChatMessage(role="user", content=content)] * count)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"text": "é" * (limits.MAX_PROMPT_BYTES // 2 + 1)}, "4194306 bytes"),
        ({"messages": chat(limits.MAX_MESSAGES + 1, "")}, "at most 4096 messages"),
        ({"messages": chat(5, "x" * 2**20)}, "bytes; at most 4194304"),
        ({"token_ids": types_pb2.TokenIds(ids=[1] * 65)}, "at most 64 prompt token ids"),
        ({"stop": ["x"] * 17}, "at most 16 stop strings are taken, not 17"),
        ({"stop": ["x" * 1025]}, "at most 1024 characters, not 1025"),
        ({"stop_token_ids": [1] * 1025}, "at most 1024 stop_token_ids"),
        ({"allowed_token_ids": [1] * 601}, "at most 600 allowed_token_ids"),
        ({"banned_token_ids": [1] * 601}, "at most 600 banned_token_ids"),
        ({"n": 2**32 - 1}, "n must be at most 16"),
        ({"model": "m" * 10**6}, "has 1000000 characters"),
        ({"session_id": "s" * 10**6}, "1 to 128 characters"),
        ({"session_id": "s", "idempotency_key": "k" * 129}, "at most 128 characters"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_too_large_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said) as refused:
        read(pb.GenerateRequest(**{"text": "ab", **fields} if "n" in fields else fields))
    # The message is for people, and does not repeat all of it.
    assert len(refused.value.message) < 500


def test_what_is_as_large_as_it_may_be_is_taken() -> None:
    call = read(
        pb.GenerateRequest(
            session_id="s" * 128,
            token_ids=types_pb2.TokenIds(ids=[1] * 63),
            stop=["x" * limits.MAX_STOP_CHARS] * limits.MAX_STOP_STRINGS,
            stop_token_ids=[1] * limits.MAX_STOP_IDS,
            n=limits.MAX_SAMPLES,
        )
    )
    assert len(call.prompt) == 63


def test_other_names_than_ours_are_refused_short() -> None:
    with pytest.raises(UnknownModelError, match="is not served"):
        read(pb.GenerateRequest(text="a", model="m" * limits.MAX_NAME_CHARS))
    with pytest.raises(InvalidRequestError, match="session_id"):
        check_name("session_id", "s" * (limits.MAX_NAME_CHARS + 1))
    check_offsets(pb.ResumeRequest(session_id="s" * 131, offsets=[2**32 - 1] * 16))
    for request in (
        pb.ResumeRequest(session_id="s" * 200),
        pb.ResumeRequest(session_id="s", offsets=[0] * 17),
    ):
        with pytest.raises(InvalidRequestError):
            check_offsets(request)


@settings(deadline=None, max_examples=300)
@given(messages(pb.GenerateRequest))
def test_any_request_is_read_or_refused(request: pb.GenerateRequest) -> None:
    request.n %= 20
    for better in (False, True):
        if better:
            # What is almost right gets further than what is all wrong.
            request.model, request.session_id, request.idempotency_key = "", "", ""
            request.text = "ab"
            del request.allowed_token_ids[:]
            request.ClearField("speculation")
        try:
            call = read(request)
        except OutriderError:
            continue
        assert 0 < len(call.prompt) < MODEL.context_len
        assert 1 <= call.samples <= limits.MAX_SAMPLES
        assert call.limits.max_new_tokens >= 1
        for given_ids in (call.prompt, call.stop_ids, call.sampling.allowed_ids):
            assert max(given_ids, default=0) < MODEL.vocab_size
