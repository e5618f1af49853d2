"""Which KV blocks belong to whom; integers only, no tensor in here.

A sequence of n tokens with valid KV needs ceil(n / BLOCK_TOKENS) blocks. Block numbers index
the pages that `outrider.model.paged` keeps.
"""

from dataclasses import dataclass, field

BLOCK_TOKENS = 16


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence and how many of its tokens have valid KV."""

    blocks: list[int] = field(default_factory=list)
    kv_len: int = 0


class BlockPool:
    """A fixed number of blocks, handed out and taken back.

    `can_grow` and `grow` are a pair: what the first promises the second does.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))

    @property
    def free(self) -> int:
        """Blocks that belong to nobody."""
        return len(self._free)

    def missing(self, table: BlockTable, tokens: int) -> int:
        """Blocks that `table` lacks to hold `tokens` tokens."""
        return max(-(-tokens // BLOCK_TOKENS) - len(table.blocks), 0)

    def can_grow(self, table: BlockTable, tokens: int) -> bool:
        """Whether `grow` would succeed."""
        return self.missing(table, tokens) <= len(self._free)

    def grow(self, table: BlockTable, tokens: int) -> None:
        """Give `table` the blocks that it lacks to hold `tokens` tokens."""
        for _ in range(self.missing(table, tokens)):
            table.blocks.append(self._free.pop())

    def trim(self, table: BlockTable, tokens: int) -> None:
        """Take back the blocks beyond those that hold `tokens` tokens."""
        needed = -(-tokens // BLOCK_TOKENS)
        while len(table.blocks) > needed:
            self._free.append(table.blocks.pop())

    def release(self, table: BlockTable) -> None:
        """Take back every block of `table`; its KV is gone."""
        self.trim(table, 0)
        table.kv_len = 0
