from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.model.blocks import BLOCK_TOKENS, BlockPool, BlockTable
from outrider.model.prefix import adoptable_blocks, extend_chain


def chain_of(tokens: Sequence[int], fingerprint: str = "f") -> list[bytes]:
    chain: list[bytes] = []
    extend_chain(chain, fingerprint, tokens)
    return chain


def filled(pool: BlockPool, tokens: Sequence[int]) -> BlockTable:
    """A table that has computed `tokens` and sealed what is full."""
    table = BlockTable()
    pool.grow(table, len(tokens))
    table.kv_len = len(tokens)
    pool.seal(table, chain_of(tokens))
    return table


def adopting(pool: BlockPool, tokens: Sequence[int]) -> BlockTable:
    table = BlockTable()
    pool.adopt(table, pool.match(chain_of(tokens), 0, adoptable_blocks(len(tokens))))
    return table


def test_grow_and_release() -> None:
    pool, table = BlockPool(4), BlockTable()
    assert pool.missing(table, 0) == 0
    assert pool.missing(table, BLOCK_TOKENS + 1) == 2
    assert pool.can_grow(table, 4 * BLOCK_TOKENS)
    assert not pool.can_grow(table, 4 * BLOCK_TOKENS + 1)
    pool.grow(table, BLOCK_TOKENS)
    pool.grow(table, BLOCK_TOKENS + 1)
    assert len(set(table.blocks)) == 2
    pool.trim(table, BLOCK_TOKENS)
    assert (len(table.blocks), pool.free) == (1, 3)
    table.kv_len = 5
    pool.release(table)
    assert (table.blocks, table.kv_len, pool.free) == ([], 0, 4)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 100)), max_size=60))
def test_no_block_is_lost_or_shared(steps: list[tuple[int, int]]) -> None:
    pool, tables = BlockPool(12), [BlockTable() for _ in range(4)]
    for index, tokens in steps:
        if pool.can_grow(tables[index], tokens):
            pool.grow(tables[index], tokens)
            assert len(tables[index].blocks) * BLOCK_TOKENS >= tokens
        else:
            pool.trim(tables[index], tokens // 2)
        held = [block for table in tables for block in table.blocks]
        assert len(held) == len(set(held)) == pool.total - pool.free
    for table in tables:
        pool.release(table)
    assert pool.free == pool.total


def test_a_prefix_is_adopted_but_for_its_last_token() -> None:
    pool, tokens = BlockPool(8), list(range(3 * BLOCK_TOKENS))
    first = filled(pool, tokens)
    second = adopting(pool, tokens)
    assert (second.blocks, second.kv_len) == (first.blocks[:2], 2 * BLOCK_TOKENS)
    longer = adopting(pool, [*tokens, 7])
    assert longer.blocks == first.blocks
    assert [pool.users(block) for block in first.blocks] == [3, 3, 2]
    assert pool.free == 5
    for table in (first, second, longer):
        pool.release(table)
    assert (pool.free, pool.cached) == (8, 3)
    other = adopting(pool, [1, *tokens])
    assert other.blocks == []


def test_what_follows_a_shared_prefix_is_a_sequences_own() -> None:
    pool, tokens = BlockPool(8), list(range(40))
    first = filled(pool, tokens)
    second = adopting(pool, tokens)
    pool.grow(second, 40)
    assert second.blocks[:2] == first.blocks[:2]
    assert set(second.blocks[2:]).isdisjoint(first.blocks)


def test_a_sealed_block_is_never_grown_into() -> None:
    pool = BlockPool(8)
    table = filled(pool, range(32))
    table.kv_len = 20
    with pytest.raises(AssertionError, match="sealed"):
        pool.grow(table, 64)


def test_of_two_blocks_with_the_same_tokens_the_first_is_the_one_to_adopt() -> None:
    pool, tokens = BlockPool(8), list(range(32))
    first, second = filled(pool, tokens), filled(pool, tokens)
    assert set(first.blocks).isdisjoint(second.blocks)
    pool.release(second)
    assert (pool.free, pool.cached) == (6, 0)
    assert adopting(pool, [*tokens, 1]).blocks == first.blocks


def test_a_sequence_goes_on_with_what_another_has_computed_further() -> None:
    pool, tokens = BlockPool(8), list(range(70))
    slow = filled(pool, tokens[:16])
    fast = adopting(pool, tokens)
    assert fast.blocks == slow.blocks
    pool.grow(fast, 70)
    fast.kv_len = 70
    pool.seal(fast, chain_of(tokens))
    pool.adopt(slow, pool.match(chain_of(tokens), 1, 4))
    assert (slow.blocks, slow.kv_len) == (fast.blocks[:4], 64)
    pool.release(slow)
    pool.release(fast)
    assert pool.free == 8
    begun = BlockTable()
    pool.grow(begun, 3)
    begun.kv_len = 3
    with pytest.raises(AssertionError, match="begun"):
        pool.adopt(begun, pool.match(chain_of(tokens), 0, 1))


def test_the_end_of_the_prefix_that_rested_longest_is_evicted_first() -> None:
    pool = BlockPool(6)
    old, new = filled(pool, range(100, 148)), filled(pool, range(200, 248))
    old_blocks = list(old.blocks)
    pool.release(old)
    pool.release(new)
    assert (pool.free, pool.cached) == (6, 6)
    table = BlockTable()
    pool.grow(table, 2 * BLOCK_TOKENS)
    assert set(table.blocks) == set(old_blocks[1:])
    assert (pool.cached, pool.evictions) == (4, 2)
    assert len(pool.match(chain_of(range(100, 148)), 0, 3)) == 1
    assert len(pool.match(chain_of(range(200, 248)), 0, 3)) == 3


def test_a_large_pool_evicts_a_few_blocks_at_once() -> None:
    pool = BlockPool(256)
    old = filled(pool, range(256 * BLOCK_TOKENS))
    pool.release(old)
    table = BlockTable()
    pool.grow(table, 1)
    assert (pool.evictions, pool.cached, pool.free) == (4, 252, 255)


def test_kv_that_can_not_be_trusted_is_not_adopted() -> None:
    pool, tokens = BlockPool(8), list(range(40))
    bad = filled(pool, tokens)
    other = adopting(pool, tokens)
    pool.release(bad, keep=False)
    assert adopting(pool, tokens).blocks == []
    assert pool.depths() == {}
    pool.release(other)
    assert (pool.free, pool.cached) == (8, 0)


def test_depths_of_the_sealed() -> None:
    pool, chain = BlockPool(8), chain_of(range(48))
    table = filled(pool, range(48))
    assert pool.depths() == {chain[0]: 1, chain[1]: 2, chain[2]: 3}
    pool.release(table)
    pool.grow(table, 6 * BLOCK_TOKENS)
    assert pool.depths() == {chain[0]: 1, chain[1]: 2}


def test_sequences_that_grow_side_by_side_get_neighbours() -> None:
    pool, tables = BlockPool(256), [BlockTable() for _ in range(3)]
    for table in tables:
        pool.grow(table, 100)
    for tokens in range(100, 400, 3):
        for table in tables:
            pool.grow(table, tokens)
    for table in tables:
        first = table.blocks[0]
        assert table.blocks == list(range(first, first + len(table.blocks)))
