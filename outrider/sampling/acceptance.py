"""Acceptance of greedy and coupled drafts: the target's own tokens decide.

Terms: n draft tokens are verified by n + 1 rows. Row 0 gives the target's token after the
committed tokens, row i + 1 the one after draft token i (and all that lead to it). Accepted:
draft tokens that are what the target says there. Recovered: the target's token where no draft
token agrees. Bonus: the target's token after a draft that was accepted to its end.

The target's tokens come from `coupled.target_tokens` (a plain argmax at temperature 0).
"""

from collections.abc import Sequence
from dataclasses import dataclass

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


def verify_tree(draft: Sequence[int], parents: Sequence[int], targets: Sequence[int]) -> Verdict:
    """The verdict on a tree of n draft tokens, given the target's n + 1 tokens.

    `parents[i]` is the index of the parent of token i, below i; -1 is the last committed
    token. Where siblings carry the same token, the first counts.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    path: list[int] = []
    node = -1
    while True:
        target = targets[node + 1]
        agreeing = [child for child in children.get(node, ()) if draft[child] == target]
        if not agreeing:
            break
        node = agreeing[0]
        path.append(node)
    accepted = [draft[index] for index in path]
    chain = verdict(accepted, target, len(draft), whole=node not in children)
    return Verdict(chain.token_ids, chain.origins, len(draft), tuple(path))
