"""Which KV blocks belong to whom; integers and hashes only, no tensor in here.

A sequence of n tokens with valid KV needs ceil(n / BLOCK_TOKENS) blocks. Block numbers index
the pages that `outrider.model.paged` keeps.

A full block whose KV is final can be *sealed* under the hash of its whole prefix (see
`outrider.model.prefix`). Sealed blocks are shared: another sequence that begins with the same
tokens *adopts* them. They are never written again, since a sequence writes at its `kv_len` and
beyond. Without users a sealed block is *cached*: it counts as free, and is evicted when blocks
are needed that nobody has used, least recently used first.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

BLOCK_TOKENS = 16
# A pool that is full of cached blocks lets go of so many at once (small pools of fewer): a
# sequence that grows block by block then gets neighbours.
_EVICTED_AT_ONCE = 8
_BLOCKS_TO_EVICT_ONE = 64
# A sequence begins where so many blocks in a row are unused, if it can, with room on both
# sides.
_ROOM = 64


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence and how many of its tokens have valid KV.

    The first `sealed` blocks are final: others may have them too.
    """

    blocks: list[int] = field(default_factory=list)
    kv_len: int = 0
    sealed: int = 0


class BlockPool:
    """A fixed number of blocks, handed out, shared and taken back.

    `can_grow` and `grow`, `match` and `adopt` are pairs: what the first promises the second
    does, as long as nothing changed hands in between. Where it can, a sequence gets
    neighbouring blocks, whose KV is read without copying.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.evictions = 0
        self._users = [0] * total
        # Of every block whether it keeps anything: 1 for those with users and the cached.
        self._kept = bytearray(total)
        self._unused = total
        self._hashes: dict[int, bytes] = {}
        self._sealed: dict[bytes, int] = {}
        self._depths: dict[bytes, int] = {}
        # Sealed blocks without users, the least recently used first.
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Blocks that no sequence has; the cached count."""
        return self._unused + len(self._cached)

    @property
    def cached(self) -> int:
        """Blocks that no sequence has, with KV that can be adopted."""
        return len(self._cached)

    def users(self, block: int) -> int:
        """How many sequences have the block."""
        return self._users[block]

    # --- growing and giving back ----------------------------------------------------------

    def missing(self, table: BlockTable, tokens: int) -> int:
        """Blocks that `table` lacks to hold `tokens` tokens."""
        return max(-(-tokens // BLOCK_TOKENS) - len(table.blocks), 0)

    def can_grow(self, table: BlockTable, tokens: int) -> bool:
        """Whether `grow` would succeed."""
        return self.missing(table, tokens) <= self.free

    def grow(self, table: BlockTable, tokens: int) -> None:
        """Give `table` the blocks that it lacks to hold `tokens` tokens."""
        assert table.kv_len >= table.sealed * BLOCK_TOKENS, "a sealed block would be written"
        lacking = self.missing(table, tokens)
        if lacking > self._unused:
            at_once = min(_EVICTED_AT_ONCE, self.total // _BLOCKS_TO_EVICT_ONE)
            self._evict(max(lacking - self._unused, at_once))
        for left in range(lacking, 0, -1):
            block = self._unused_block(table.blocks[-1] + 1 if table.blocks else None, left)
            self._kept[block] = self._users[block] = 1
            self._unused -= 1
            table.blocks.append(block)

    def trim(self, table: BlockTable, tokens: int) -> None:
        """Take back the blocks beyond those that hold `tokens` tokens."""
        needed = -(-tokens // BLOCK_TOKENS)
        # From the end, so that the end of a prefix is evicted before what leads to it.
        while len(table.blocks) > needed:
            self._leave(table.blocks.pop())
        table.sealed = min(table.sealed, len(table.blocks))

    def release(self, table: BlockTable, *, keep: bool = True) -> None:
        """Take back every block of `table`.

        Its sealed blocks stay cached, unless `keep` is False: then nobody adopts them any
        more, whoever else has them.
        """
        if not keep:
            for block in table.blocks:
                self._unseal(block)
        self.trim(table, 0)
        table.kv_len = 0

    # --- sharing --------------------------------------------------------------------------

    def seal(self, table: BlockTable, chain: Sequence[bytes]) -> None:
        """Let others adopt the blocks whose KV is valid to the end; `chain` has their hashes.

        Where another block has the same hash already, that one stays the one to adopt.
        """
        end = min(table.kv_len // BLOCK_TOKENS, len(chain))
        for index in range(table.sealed, end):
            block_hash, block = chain[index], table.blocks[index]
            if block_hash not in self._sealed:
                self._sealed[block_hash] = block
                self._hashes[block] = block_hash
                self._depths[block_hash] = index + 1
        table.sealed = max(table.sealed, end)

    def match(self, chain: Sequence[bytes], begin: int, end: int) -> tuple[int, ...]:
        """The sealed blocks for chain[begin:end], up to the first that there is none for."""
        blocks: list[int] = []
        for block_hash in chain[begin:end]:
            block = self._sealed.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return tuple(blocks)

    def adopt(self, table: BlockTable, blocks: Sequence[int]) -> None:
        """Let `table`, whose blocks are full, go on with `blocks` of `match`."""
        assert table.kv_len == len(table.blocks) * BLOCK_TOKENS, "a block has been begun"
        for block in blocks:
            if not self._users[block]:
                del self._cached[block]
            self._users[block] += 1
        table.blocks.extend(blocks)
        table.sealed = len(table.blocks)
        table.kv_len = table.sealed * BLOCK_TOKENS

    def depths(self) -> dict[bytes, int]:
        """The hashes of all sealed blocks, oldest first, and how many blocks each stands for.

        A copy, and the only method that other threads may call.
        """
        return self._depths.copy()

    # --- parts ----------------------------------------------------------------------------

    def _leave(self, block: int) -> None:
        """One user less."""
        self._users[block] -= 1
        if self._users[block]:
            return
        if block in self._hashes:
            self._cached[block] = None
        else:
            self._kept[block] = 0
            self._unused += 1

    def _evict(self, count: int) -> None:
        """Forget the cached blocks that were not used for longest."""
        for block in list(islice(self._cached, count)):
            self._unseal(block)
            self.evictions += 1

    def _unseal(self, block: int) -> None:
        """Let nobody adopt the block any more."""
        block_hash = self._hashes.pop(block, None)
        if block_hash is None:
            return
        del self._sealed[block_hash], self._depths[block_hash]
        if block in self._cached:
            del self._cached[block]
            self._kept[block] = 0
            self._unused += 1

    def _unused_block(self, wanted: int | None, count: int) -> int:
        """An unused block, `wanted` if it is one; `count` more or less will follow it."""
        if wanted is not None and wanted < self.total and not self._kept[wanted]:
            return wanted
        room = max(_ROOM, count)
        while (begin := self._kept.find(bytes(room))) < 0:
            room //= 2
            assert room, "there is no unused block"
        # At the very beginning nobody needs room before it.
        return begin + max(room - count, 0) // 2 if begin else 0
