"""Acceptance of greedy and coupled drafts: the target's own tokens decide.

Terms: n draft tokens are verified by n + 1 rows. Row 0 gives the target's token after the
committed tokens, row i + 1 the one after draft token i (and all that lead to it). Accepted:
draft tokens that are what the target says there. Recovered: the target's token where no draft
token agrees. Bonus: the target's token after a draft that was accepted to its end.

The target's tokens come from `coupled.target_tokens` (a plain argmax at temperature 0).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from outrider.messages import TokenOrigin


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one round commits: the accepted tokens and one token of the target's own.

    `path` holds the indices of the accepted draft tokens, which are 0, 1, … for a chain.
    """

    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    draft_tokens: int
    path: tuple[int, ...] = ()

    @property
    def accepted(self) -> int:
        """Accepted draft tokens among `token_ids`."""
        return self.origins.count(TokenOrigin.ACCEPTED)

    def cut(self, tokens: int) -> "Verdict":
        """The verdict as if the session had ended after `tokens` of its tokens.

        Draft tokens beyond the end do not count as verified.
        """
        if tokens >= len(self.token_ids):
            return self
        verified = min(self.draft_tokens, tokens)
        return Verdict(self.token_ids[:tokens], self.origins[:tokens], verified, self.path[:tokens])


def verdict(accepted: Sequence[int], last: int, draft_tokens: int, *, whole: bool) -> Verdict:
    """The verdict that accepts a chain's first tokens; `whole`: nothing was left to accept."""
    if not draft_tokens:
        origin = TokenOrigin.PLAIN
    else:
        origin = TokenOrigin.BONUS if whole else TokenOrigin.RECOVERED
    return Verdict(
        token_ids=(*accepted, last),
        origins=(TokenOrigin.ACCEPTED,) * len(accepted) + (origin,),
        draft_tokens=draft_tokens,
        path=tuple(range(len(accepted))),
    )


def verify_chain(draft: Sequence[int], targets: Sequence[int]) -> Verdict:
    """The verdict on a chain of k draft tokens, given the target's k + 1 tokens."""
    accepted = 0
    while accepted < len(draft) and draft[accepted] == targets[accepted]:
        accepted += 1
    whole = accepted == len(draft)
    return verdict(draft[:accepted], targets[accepted], len(draft), whole=whole)


class TargetTokens(Protocol):
    """The target's token on each row; None for a row that decides nothing (a dead one)."""

    def __getitem__(self, row: int, /) -> int | None:
        """The token of row 0 .. n; asked for only where the verdict depends on it."""
        ...


def verify_tree(draft: Sequence[int], parents: Sequence[int], targets: TargetTokens) -> Verdict:
    """The verdict on a tree of n draft tokens, given the target's n + 1 tokens.

    `parents[i]` is the index of the parent of token i, below i; -1 is the last committed
    token. Where siblings carry the same token, the first counts. A node after which the target
    has no token ends the path before it: with what follows it, it counts as not drafted.

    Raises:
        ValueError: there is no token after the last committed one.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    path: list[int] = []
    end, own = -1, targets[0]
    if own is None:
        raise ValueError("the target has no token after the committed ones")
    while True:
        here = children.get(end, [])
        agreeing = [child for child in here if draft[child] == own]
        if not agreeing:
            break
        after = targets[agreeing[0] + 1]
        if after is None:
            left_out = _subtree(agreeing[0], parents)
            return _tree_verdict(draft, path, own, here == agreeing, len(left_out))
        end, own = agreeing[0], after
        path.append(end)
    return _tree_verdict(draft, path, own, not here, 0)


def _tree_verdict(
    draft: Sequence[int], path: Sequence[int], own: int, whole: bool, left_out: int
) -> Verdict:
    accepted = [draft[node] for node in path]
    chain = verdict(accepted, own, len(draft) - left_out, whole=whole)
    return replace(chain, path=tuple(path))


def _subtree(root: int, parents: Sequence[int]) -> set[int]:
    nodes = {root}
    for node, parent in enumerate(parents):
        if parent in nodes:
            nodes.add(node)
    return nodes
