"""What a session was asked for, as the JSON field of its record."""

import json
from typing import Any

from outrider.messages import AcceptanceRule, LogprobOptions, SamplingParams, SpeculationOptions


def sampling_to_dict(sampling: SamplingParams) -> dict[str, Any]:
    """Everything but the seed, which JSON readers would round."""
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "logit_bias": sampling.logit_bias,
        "bad_words": sampling.bad_words,
        "min_tokens": sampling.min_tokens,
        "allowed_ids": sampling.allowed_ids,
        "banned_ids": sampling.banned_ids,
    }


def sampling_from_dict(asked: dict[str, Any], seed: int) -> SamplingParams:
    """The inverse of `sampling_to_dict`."""
    return SamplingParams(
        temperature=asked["temperature"],
        top_k=asked["top_k"],
        top_p=asked["top_p"],
        seed=seed,
        min_p=asked["min_p"],
        repetition_penalty=asked["repetition_penalty"],
        frequency_penalty=asked["frequency_penalty"],
        presence_penalty=asked["presence_penalty"],
        logit_bias=tuple((token, bias) for token, bias in asked["logit_bias"]),
        bad_words=tuple(tuple(word) for word in asked["bad_words"]),
        min_tokens=asked["min_tokens"],
        allowed_ids=tuple(asked["allowed_ids"]),
        banned_ids=tuple(asked["banned_ids"]),
    )


def speculation_to_dict(speculation: SpeculationOptions) -> dict[str, Any]:
    """To plain values."""
    return {
        "speculation": speculation.enabled,
        "draft_len": speculation.draft_len,
        "auto_draft_len": speculation.auto_draft_len,
        "rule": speculation.rule.value,
    }


def speculation_from_dict(asked: dict[str, Any]) -> SpeculationOptions:
    """The inverse of `speculation_to_dict`."""
    rule = AcceptanceRule(asked["rule"])
    return SpeculationOptions(
        asked["speculation"], asked["draft_len"], rule, asked["auto_draft_len"]
    )


def logprobs_to_dict(logprobs: LogprobOptions | None) -> dict[str, Any]:
    """To plain values."""
    if logprobs is None:
        return {"logprobs": None}
    return {"logprobs": {"top": logprobs.top, "processed": logprobs.processed}}


def logprobs_from_dict(asked: dict[str, Any]) -> LogprobOptions | None:
    """The inverse of `logprobs_to_dict`."""
    found = asked["logprobs"]
    return LogprobOptions(found["top"], found["processed"]) if found else None


def to_json(parameters: dict[str, Any]) -> str:
    """One line; every number in it is finite."""
    return json.dumps(parameters, allow_nan=False)
