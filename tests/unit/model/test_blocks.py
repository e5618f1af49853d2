from hypothesis import given
from hypothesis import strategies as st

from outrider.model.blocks import BLOCK_TOKENS, BlockPool, BlockTable


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
