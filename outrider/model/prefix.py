"""Names for the KV of token prefixes: a chain of hashes, one for each full block.

    chain[i] = blake2b(chain[i - 1], ids of block i as little-endian uint32),  chain[-1] = seed

So chain[i] stands for all tokens up to the end of block i. The seed tells by whom they were
computed: with one seed, equal hashes stand for the same KV on any worker, and with two seeds
they never meet. No torch in here: coordinators compute the same hashes.
"""

import hashlib
import struct
from collections.abc import Sequence

from outrider.model.blocks import BLOCK_TOKENS

_BLOCK = struct.Struct(f"<{BLOCK_TOKENS}I")
# Nobody finds two texts with the same hash, whatever they try: a session never gets the KV of
# other tokens.
_HASH_BYTES = 32
_FINGERPRINT_BYTES = 16


def kv_fingerprint(model_fingerprint: str, dtype: str, numerics: str) -> str:
    """What tells whether the KV of two workers is the same: hex, the seed of their chains."""
    identity = f"outrider kv/{BLOCK_TOKENS}/{model_fingerprint}/{dtype}/{numerics}"
    return hashlib.blake2b(identity.encode(), digest_size=_FINGERPRINT_BYTES).hexdigest()


def extend_chain(chain: list[bytes], fingerprint: str, token_ids: Sequence[int]) -> None:
    """Append the hashes of the full blocks of `token_ids` that `chain` does not have yet.

    `chain` has those of the first blocks already. `fingerprint` is of `kv_fingerprint`; ids
    are within uint32.
    """
    parent = chain[-1] if chain else fingerprint.encode()
    for begin in range(len(chain) * BLOCK_TOKENS, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = _BLOCK.pack(*token_ids[begin : begin + BLOCK_TOKENS])
        parent = hashlib.blake2b(parent + block, digest_size=_HASH_BYTES).digest()
        chain.append(parent)


def adoptable_blocks(tokens: int) -> int:
    """How many blocks a sequence of `tokens` tokens may adopt: a row must be left to compute."""
    return max(tokens - 1, 0) // BLOCK_TOKENS
