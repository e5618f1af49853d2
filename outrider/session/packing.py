"""What a session's logs are made of: token ids and log-probabilities as bytes.

Both logs are appended to, so packing parts one after the other is packing the whole.
"""

import struct
from collections.abc import Sequence

from outrider.messages import TokenLogprobs

TOKEN_BYTES = 4

# Of one token: its log-probability, and how many of the best follow; each is an id and its own.
_TOKEN = struct.Struct("<dH")
_BEST = struct.Struct("<Id")


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def unpack_tokens(log: bytes) -> list[int]:
    """The inverse of `pack_tokens`."""
    return list(struct.unpack(f"<{len(log) // TOKEN_BYTES}I", log))


def pack_logprobs(logprobs: Sequence[TokenLogprobs]) -> bytes:
    """Log-probabilities as little-endian float64, with the ids that they are of as uint32."""
    parts: list[bytes] = []
    for entry in logprobs:
        parts.append(_TOKEN.pack(entry.logprob, len(entry.top)))
        parts += [_BEST.pack(token_id, logprob) for token_id, logprob in entry.top]
    return b"".join(parts)


def unpack_logprobs(log: bytes) -> list[TokenLogprobs]:
    """The inverse of `pack_logprobs`."""
    entries: list[TokenLogprobs] = []
    at = 0
    while at < len(log):
        logprob, best = _TOKEN.unpack_from(log, at)
        at += _TOKEN.size
        end = at + best * _BEST.size
        entries.append(TokenLogprobs(logprob, tuple(_BEST.iter_unpack(log[at:end]))))
        at = end
    return entries
