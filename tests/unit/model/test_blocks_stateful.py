"""The pool against a plain model: what each sequence has, what is sealed, what rests."""

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from outrider.model.blocks import BLOCK_TOKENS, BlockPool, BlockTable
from outrider.model.prefix import adoptable_blocks, extend_chain

TABLES = 4
TOTAL = 10
WHICH = st.integers(0, TABLES - 1)
Prefix = tuple[int, ...]


def chain_of(tokens: Sequence[int]) -> list[bytes]:
    chain: list[bytes] = []
    extend_chain(chain, "f", tokens)
    return chain


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.tables = [BlockTable() for _ in range(TABLES)]
        self.texts: list[list[int]] = [[] for _ in range(TABLES)]
        # The tokens whose KV lies in each block.
        self.written: dict[int, list[int]] = {}
        # Whole prefixes by the block with their end; those that nobody has, by their age.
        self.sealed: dict[Prefix, int] = {}
        self.resting: list[Prefix] = []

    def users(self, block: int) -> int:
        return sum(table.blocks.count(block) for table in self.tables)

    def drop(self, which: int, kept: int) -> None:
        """What the model makes of a sequence that keeps its first blocks only."""
        table = self.tables[which]
        for block in reversed(table.blocks[kept:]):
            if self.users(block) == 1:
                self.resting += [text for text, at in self.sealed.items() if at == block]

    @rule(which=WHICH, text=st.lists(st.integers(0, 1), max_size=4), extra=st.integers(0, 15))
    def begin(self, which: int, text: list[int], extra: int) -> None:
        """Blocks of equal tokens, so that prefixes are often shared."""
        self.close(which, keep=True)
        self.texts[which] = [token for token in text for _ in range(BLOCK_TOKENS)] + [9] * extra

    @rule(which=WHICH)
    def adopt(self, which: int) -> None:
        table, text = self.tables[which], self.texts[which]
        if table.kv_len % BLOCK_TOKENS:
            return
        begin, end = table.kv_len // BLOCK_TOKENS, adoptable_blocks(len(text))
        found = self.pool.match(chain_of(text), begin, end)
        expected = []
        for number in range(begin, end):
            block = self.sealed.get(tuple(text[: (number + 1) * BLOCK_TOKENS]))
            if block is None:
                break
            expected.append(block)
        assert list(found) == expected
        if not found:
            return
        self.resting = [prefix for prefix in self.resting if self.sealed[prefix] not in found]
        self.pool.adopt(table, found)
        assert table.kv_len == (begin + len(found)) * BLOCK_TOKENS

    @rule(which=WHICH, rows=st.integers(1, 40))
    def compute(self, which: int, rows: int) -> None:
        """A chunk: room for it, then its KV, then the blocks that it filled."""
        table, text = self.tables[which], self.texts[which]
        end = min(table.kv_len + rows, len(text))
        lacking = self.pool.missing(table, end)
        held = {block for other in self.tables for block in other.blocks}
        unused = TOTAL - len(held) - len(self.resting)
        can = lacking <= unused + len(self.resting)
        assert self.pool.can_grow(table, end) is can
        if not can:
            return
        before = list(table.blocks)
        self.pool.grow(table, end)
        # Those that rested longest made room, and no more than had to.
        for prefix in self.resting[: max(lacking - unused, 0)]:
            self.resting.remove(prefix)
            del self.sealed[prefix]
        assert table.blocks[: len(before)] == before
        for block in table.blocks[len(before) :]:
            assert block not in held
            assert block not in self.sealed.values()
        for at in range(table.kv_len, end):
            block = table.blocks[at // BLOCK_TOKENS]
            assert block not in self.sealed.values()
            kept = self.written.get(block, [])[: at % BLOCK_TOKENS]
            self.written[block] = [*kept, text[at]]
        table.kv_len = end
        for number in range(table.sealed, table.kv_len // BLOCK_TOKENS):
            prefix = tuple(text[: (number + 1) * BLOCK_TOKENS])
            self.sealed.setdefault(prefix, table.blocks[number])
        self.pool.seal(table, chain_of(text))

    @rule(which=WHICH, tokens=st.integers(0, 60))
    def grow_and_trim(self, which: int, tokens: int) -> None:
        """Room for a draft that is rejected whole; only where nothing has to go for it."""
        table = self.tables[which]
        held = {block for other in self.tables for block in other.blocks}
        if self.pool.missing(table, tokens) <= TOTAL - len(held) - len(self.resting):
            self.pool.grow(table, tokens)
        self.drop(which, -(-table.kv_len // BLOCK_TOKENS))
        self.pool.trim(table, table.kv_len)

    @rule(which=WHICH, keep=st.booleans())
    def close(self, which: int, keep: bool) -> None:
        table = self.tables[which]
        if not keep:
            bad = set(table.blocks)
            self.sealed = {text: at for text, at in self.sealed.items() if at not in bad}
        self.drop(which, 0)
        self.pool.release(table, keep=keep)
        assert (table.blocks, table.kv_len, table.sealed) == ([], 0, 0)
        self.texts[which] = []

    @invariant()
    def the_counts_agree(self) -> None:
        held = {block for table in self.tables for block in table.blocks}
        assert self.pool.free == TOTAL - len(held)
        assert self.pool.cached == len(self.resting)
        assert [self.pool.users(block) for block in range(TOTAL)] == [
            self.users(block) for block in range(TOTAL)
        ]
        depths = {chain_of(text)[-1]: len(text) // BLOCK_TOKENS for text in self.sealed}
        assert self.pool.depths() == depths

    @invariant()
    def every_sequence_has_its_own_tokens(self) -> None:
        for table, text in zip(self.tables, self.texts, strict=True):
            for at in range(table.kv_len):
                block = table.blocks[at // BLOCK_TOKENS]
                assert self.written[block][at % BLOCK_TOKENS] == text[at]

    @invariant()
    def only_full_blocks_are_shared(self) -> None:
        for table in self.tables:
            for number, block in enumerate(table.blocks):
                if self.users(block) > 1:
                    assert table.kv_len >= (number + 1) * BLOCK_TOKENS

    def teardown(self) -> None:
        for which in range(TABLES):
            self.close(which, keep=True)
        assert self.pool.free == TOTAL


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase
