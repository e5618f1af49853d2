"""Many short completions of one prompt through a running system: what its law is made of."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.client import AsyncClient, GenerateOptions
from outrider.figures import SpeculationFigures


@dataclass(slots=True)
class Drawn:
    """The first tokens of each completion, and what speculation did for all of them."""

    outcomes: list[tuple[int, ...]] = field(default_factory=list)
    figures: SpeculationFigures = field(default_factory=SpeculationFigures)


async def draw_outcomes(
    client: AsyncClient,
    options: GenerateOptions,
    *,
    samples: int,
    tokens: int,
    first_seed: int = 0,
    at_once: int = 64,
    advance: Callable[[int], None] = lambda _: None,
) -> Drawn:
    """The first `tokens` tokens of `samples` completions, with seeds from `first_seed` on.

    `options` has the prompt, and how its tokens are sampled.

    Each completion is one token longer: the last token of a completion is never drafted, and
    every token that counts is meant to be, except the first. `advance` is told of each
    completion.
    """
    drawn = Drawn()
    seeds = iter(range(first_seed, first_seed + samples))

    async def draw() -> None:
        for seed in seeds:
            request: GenerateOptions = {**options, "seed": seed, "max_tokens": tokens + 1}
            completion = await client.complete(**request)
            drawn.outcomes.append(completion.token_ids[:tokens])
            drawn.figures.add(completion.speculation)
            advance(1)

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(draw())
    return drawn
