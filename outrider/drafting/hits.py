"""How often what was proposed came true, counted token by token, recent ones for more."""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.messages import Draft

# Over about how many tokens is averaged, and for how many the guess beforehand counts.
_REMEMBERED = 64
_GUESSED = 8


@dataclass(slots=True)
class Hits:
    """Tokens that came true, beside those that were expected to.

    The ratio of the two corrects expectations; with every token expected, it is the rate.
    """

    came: float = 0.0
    expected: float = 0.0

    def note(self, matched: int, missed: bool, chances: Sequence[float] | None = None) -> None:
        """Count `matched` tokens that came true and, if one `missed`, the one after them.

        `chances` is what was expected of each; without it each was expected for certain.
        """
        for index in range(matched + missed):
            keep = 1 - 1 / _REMEMBERED
            chance = 1.0 if chances is None else chances[index]
            self.came = keep * self.came + (index < matched)
            self.expected = keep * self.expected + chance

    def ratio(self, prior: float) -> float:
        """What came for each token expected, given what to suppose of one unseen."""
        return (self.came + _GUESSED * prior) / (self.expected + _GUESSED)


def compared(draft: Draft, committed: Sequence[int]) -> tuple[int, bool]:
    """How many tokens of the draft came true, and whether the next one did not.

    The committed tokens can end before they tell. Of a tree the path that they take counts.
    """
    matched, place = 0, -1
    parents = draft.parents or range(-1, len(draft.token_ids) - 1)
    for token in committed:
        children = [node for node, parent in enumerate(parents) if parent == place]
        if not children:
            return matched, False
        following = [node for node in children if draft.token_ids[node] == token]
        if not following:
            return matched, True
        place = following[0]
        matched += 1
    return matched, False
