"""The prefix cache: sessions leave the KV of their full blocks, others go on from it.

`adoption` only looks; blocks change hands in `adopt` and `seal`. Everything is done by the
hashes of `outrider.model.prefix`, so a session gets the KV of its own tokens or none.
"""

from outrider.model.blocks import BLOCK_TOKENS, BlockPool
from outrider.model.prefix import adoptable_blocks, extend_chain
from verify_worker.state import Adoption, Counters, Session, Work


class PrefixCache:
    """What sessions share of a pool; with an empty `fingerprint` nothing.

    `fingerprint` tells by what model and how the KV is computed (`kv_fingerprint`).
    """

    def __init__(self, pool: BlockPool, counters: Counters, fingerprint: str = "") -> None:
        self.fingerprint = fingerprint
        self._pool = pool
        self._counters = counters

    def note_tokens(self, session: Session) -> None:
        """Hash the blocks that the session's tokens have filled."""
        if self.fingerprint:
            extend_chain(session.chain, self.fingerprint, session.tokens)

    def adoption(self, session: Session) -> Adoption | None:
        """The sealed blocks with which the session would get on from where its KV ends.

        None in the middle of a block: the session completes what it has begun.
        """
        begin, begun = divmod(session.table.kv_len, BLOCK_TOKENS)
        if begun:
            return None
        blocks = self._pool.match(session.chain, begin, adoptable_blocks(len(session.tokens)))
        if not blocks:
            return None
        return Adoption(blocks, (begin + len(blocks)) * BLOCK_TOKENS)

    def adopt(self, work: Work) -> None:
        """Give the session the blocks that the plan found for it."""
        session = work.session
        if self.fingerprint and not session.table.blocks:
            self._counters.prefix_queries += len(session.tokens)
        if work.adoption is None:
            return
        found = work.adoption.kv_len - session.table.kv_len
        self._pool.adopt(session.table, work.adoption.blocks)
        self._counters.prefix_hits += found
        if not session.figures.rounds:
            session.cached_tokens = min(session.cached_tokens + found, session.prompt_len)

    def seal(self, session: Session) -> None:
        """Leave the blocks whose KV is complete to others."""
        self._pool.seal(session.table, session.chain)
