"""Trees of tokens that are worth verifying, made of what drafters guess. Pure.

A guess is a tree of tokens with the chance of each, given that the one before it is right. Guesses
of several drafters are laid over each other: what they share is one path, where they differ is a
fork. Of that the tokens are kept that are reached with a chance above what a row costs, the
likeliest first, so that whoever has fewer rows leaves out the last ones.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from outrider.messages import Draft
from outrider.model.rows import NO_PARENT

_Edge = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Guess:
    """Tokens [n], for each the index of its parent, below its own, and its chance after that."""

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()

    @classmethod
    def chain(cls, token_ids: Sequence[int], chances: Sequence[float]) -> "Guess":
        """Each token after the one before it."""
        parents = tuple(range(NO_PARENT, len(token_ids) - 1))
        return cls(tuple(token_ids), parents, tuple(chances))

    @classmethod
    def levels(
        cls, tokens: Sequence[Sequence[int]], chances: Sequence[Sequence[float]]
    ) -> "Guess":
        """Several tokens a level, each level after the first token of the one before it."""
        token_ids: list[int] = []
        parents: list[int] = []
        last = NO_PARENT
        for level in tokens:
            parents += [last] * len(level)
            last = len(token_ids)
            token_ids += level
        flat = tuple(chance for level in chances for chance in level)
        return cls(tuple(token_ids), tuple(parents), flat)


def join(guesses: Sequence[Guess], least: float, most_nodes: int) -> Draft:
    """The tokens of all guesses that are reached with a chance of `least`, up to `most_nodes`.

    What two guesses say of a place is believed as far as it goes together: where chances add
    up to more than 1 they are scaled down.
    """
    places: list[_Edge] = []
    chances: list[float] = []
    known: dict[_Edge, int] = {}
    for guess in guesses:
        mine: list[int] = []
        for token, parent, chance in zip(
            guess.token_ids, guess.parents, guess.chances, strict=True
        ):
            edge = (NO_PARENT if parent == NO_PARENT else mine[parent], token)
            node = known.get(edge)
            if node is None:
                node = known[edge] = len(places)
                places.append(edge)
                chances.append(chance)
            else:
                # Two that agree are more often right than either.
                chances[node] = 1 - (1 - chances[node]) * (1 - chance)
            mine.append(node)
    sums: dict[int, float] = {}
    for (parent, _), chance in zip(places, chances, strict=True):
        sums[parent] = sums.get(parent, 0.0) + chance
    reached: list[float] = []
    for (parent, _), chance in zip(places, chances, strict=True):
        before = 1.0 if parent == NO_PARENT else reached[parent]
        reached.append(before * chance / max(sums[parent], 1.0))
    kept = [node for node, chance in enumerate(reached) if chance >= least]
    # Of equals the one that came first, which is the parent.
    kept.sort(key=lambda node: -reached[node])
    return _draft(places, kept[:most_nodes])


def _draft(places: Sequence[_Edge], kept: Iterable[int]) -> Draft:
    token_ids: list[int] = []
    parents: list[int] = []
    number = {NO_PARENT: NO_PARENT}
    for node in kept:
        parent, token = places[node]
        number[node] = len(token_ids)
        token_ids.append(token)
        parents.append(number[parent])
    draft = Draft(tuple(token_ids), tuple(parents), priced=True)
    return replace(draft, parents=()) if draft.is_chain else draft
