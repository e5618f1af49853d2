"""Acceptance: which draft tokens the target agrees with, and what is committed.

Terms: k draft tokens are verified by k + 1 rows; row i gives the target's token y_i after
the committed tokens and i draft tokens. Accepted: draft tokens that equal their y_i, up to
the first that differs. Recovered: the y_i in the place of that one. Bonus: y_k when all
agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.messages import TokenOrigin


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one round commits: the accepted tokens and one token of the target's own."""

    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    draft_tokens: int

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
        return Verdict(self.token_ids[:tokens], self.origins[:tokens], verified)


def verify_chain(draft: Sequence[int], targets: Sequence[int]) -> Verdict:
    """The verdict on a chain of k draft tokens, given the target's k + 1 tokens.

    The target's tokens come from `coupled.target_tokens`, so this is the acceptance of the
    greedy and of the coupled rule.
    """
    accepted = 0
    while accepted < len(draft) and draft[accepted] == targets[accepted]:
        accepted += 1
    if not draft:
        last = TokenOrigin.PLAIN
    elif accepted == len(draft):
        last = TokenOrigin.BONUS
    else:
        last = TokenOrigin.RECOVERED
    return Verdict(
        token_ids=(*draft[:accepted], targets[accepted]),
        origins=(TokenOrigin.ACCEPTED,) * accepted + (last,),
        draft_tokens=len(draft),
    )
