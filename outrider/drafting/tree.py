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
    def levels(cls, tokens: Sequence[Sequence[int]], chances: Sequence[Sequence[float]]) -> "Guess":
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

    Where two guesses agree on a token, it is more often right than either says. Where they differ,
    what the less certain one says counts as far as the other is wrong.
    """
    places: list[_Edge] = []
    reached: list[float] = []
    heads = [_children(guess) for guess in guesses]
    # Places to go on from, each with where every guess has it, and with its chance.
    open_places = [(NO_PARENT, 1.0, dict.fromkeys(range(len(guesses)), NO_PARENT))]
    for place, before, where in open_places:
        for token, (chance, nodes) in _believed(guesses, heads, where).items():
            if before * chance < least:
                continue
            open_places.append((len(places), before * chance, nodes))
            places.append((place, token))
            reached.append(before * chance)
    # Of equals the one that came first, which is the parent.
    kept = sorted(range(len(places)), key=lambda node: -reached[node])
    return _draft(places, kept[:most_nodes])


def _children(guess: Guess) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(guess.parents):
        children.setdefault(parent, []).append(node)
    return children


def _believed(
    guesses: Sequence[Guess], heads: Sequence[dict[int, list[int]]], where: dict[int, int]
) -> dict[int, tuple[float, dict[int, int]]]:
    """The tokens that may come at a place: the chance of each, and where each guess has it."""
    said = [
        (number, heads[number][node]) for number, node in where.items() if node in heads[number]
    ]
    said.sort(key=lambda one: -max(guesses[one[0]].chances[node] for node in one[1]))
    found: dict[int, tuple[float, dict[int, int]]] = {}
    left = 1.0
    for number, nodes in said:
        guess = guesses[number]
        known = set(found)
        for node in nodes:
            token, chance = guess.token_ids[node], guess.chances[node]
            if token in known:
                before, others = found[token]
                found[token] = 1 - (1 - before) * (1 - chance), {**others, number: node}
            else:
                found[token] = chance * left, {number: node}
        left *= 1 - max(guess.chances[node] for node in nodes)
    return found


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
