"""One completion of a prompt by one side, and what is said of many of them."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.rounds import Spread, ratios
from outrider.client import AsyncClient
from outrider.figures import SpeculationFigures


@dataclass(frozen=True, slots=True)
class Turn:
    """What a side said to one prompt, and the seconds from the request to the last token."""

    token_ids: tuple[int, ...]
    seconds: float
    figures: SpeculationFigures = field(default_factory=SpeculationFigures)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return len(self.token_ids) / self.seconds


async def complete(
    client: AsyncClient,
    prompt: Sequence[int],
    *,
    speculation: bool | int | str,
    new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> Turn:
    """Through the services, as a client sees it."""
    began = time.perf_counter()
    completion = await client.complete(
        token_ids=prompt,
        max_tokens=new_tokens,
        temperature=temperature,
        seed=seed,
        speculation=speculation,
    )
    seconds = time.perf_counter() - began
    return Turn(completion.token_ids, seconds, completion.speculation)


@dataclass(frozen=True, slots=True)
class Compared:
    """One side over another on the same prompts.

    `over` is the ratio of tokens per second by prompt, `in_total` that of all tokens over all
    seconds.
    """

    over: Spread
    in_total: float

    @classmethod
    def of(cls, side: Sequence[Turn], base: Sequence[Turn]) -> "Compared":
        """Of at least one prompt."""
        over = ratios([turn.rate for turn in side], [turn.rate for turn in base])
        return cls(over, total_rate(side) / total_rate(base))


def total_rate(turns: Sequence[Turn]) -> float:
    """All tokens over all seconds."""
    return sum(len(turn.token_ids) for turn in turns) / sum(turn.seconds for turn in turns)


def median_rate(turns: Sequence[Turn]) -> float:
    """The median of tokens per second."""
    return statistics.median(turn.rate for turn in turns)


def differences(side: Sequence[Turn], base: Sequence[Turn]) -> list[dict[str, Any]]:
    """Where texts differ: the prompt's number, the place, and both tokens there (None: an end)."""
    found = []
    for number, (one, other) in enumerate(zip(side, base, strict=True)):
        left, right = one.token_ids, other.token_ids
        if left == right:
            continue
        at = next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)
        at = min(len(left), len(right)) if at is None else at
        found.append({"prompt": number, "at": at, "token_ids": [_at(left, at), _at(right, at)]})
    return found


def by_category(
    categories: Sequence[str], sides: Mapping[str, Sequence[Turn]], last: str
) -> dict[str, dict[str, list[Turn]]]:
    """The turns of each side by category, and under the name `last` all of them."""
    chosen = {}
    for category in [*sorted(set(categories)), last]:
        wanted = [n for n, of in enumerate(categories) if category in (last, of)]
        chosen[category] = {name: [turns[n] for n in wanted] for name, turns in sides.items()}
    return chosen


def _at(token_ids: Sequence[int], place: int) -> int | None:
    return token_ids[place] if place < len(token_ids) else None
