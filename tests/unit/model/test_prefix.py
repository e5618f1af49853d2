import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.model.blocks import BLOCK_TOKENS
from outrider.model.prefix import adoptable_blocks, extend_chain, kv_fingerprint


def chain_of(tokens: list[int], fingerprint: str = "f") -> list[bytes]:
    chain: list[bytes] = []
    extend_chain(chain, fingerprint, tokens)
    return chain


def test_the_chain_is_the_documented_one() -> None:
    tokens = list(range(2**32 - 20, 2**32)) + list(range(20))
    first = hashlib.blake2b(b"f" + struct.pack("<16I", *tokens[:16]), digest_size=32).digest()
    second = hashlib.blake2b(first + struct.pack("<16I", *tokens[16:32]), digest_size=32).digest()
    assert chain_of(tokens) == [first, second]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=70), st.integers(0, 70))
def test_a_chain_grows_with_its_tokens(tokens: list[int], cut: int) -> None:
    chain = chain_of(tokens[:cut])
    extend_chain(chain, "f", tokens)
    assert chain == chain_of(tokens)
    assert len(chain) == len(tokens) // BLOCK_TOKENS
    assert len(set(chain)) == len(chain)


def test_a_hash_stands_for_everything_before_it() -> None:
    tokens = list(range(48))
    changed = [*tokens[:3], 99, *tokens[4:]]
    assert set(chain_of(tokens)).isdisjoint(chain_of(changed))
    assert chain_of(tokens)[:2] == chain_of([*tokens[:32], *changed])[:2]


def test_what_computes_the_kv_is_part_of_every_hash() -> None:
    fingerprint = kv_fingerprint("model", "float32", "fast")
    others = {
        kv_fingerprint("model", "float32", "invariant"),
        kv_fingerprint("model", "bfloat16", "fast"),
        kv_fingerprint("other", "float32", "fast"),
        fingerprint,
    }
    assert len(others) == 4
    hashes = {name: chain_of(list(range(16)), name)[0] for name in others}
    assert len(set(hashes.values())) == 4


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 0), (16, 0), (17, 1), (32, 1), (33, 2)])
def test_one_row_is_left_to_compute(tokens: int, blocks: int) -> None:
    assert adoptable_blocks(tokens) == blocks
