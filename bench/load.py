"""Many different completions at once, each compared with what it said undisturbed."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from outrider.client import AsyncClient, Completion, GenerateOptions
from outrider.errors import OutriderError

# What a tiny model of `bench.tiny` speaks.
LETTERS = 24


@dataclass(frozen=True, slots=True)
class Said:
    """All that one completion said, but for what depends on chance: origins and times."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    logprobs: tuple[float, ...]

    @classmethod
    def of(cls, completion: Completion) -> "Said":
        """What it said."""
        logprobs = tuple(entry.logprob for entry in completion.logprobs)
        reason = completion.finish_reason.value
        return cls(completion.token_ids, completion.text, reason, logprobs)


def options(number: int, new_tokens: int) -> GenerateOptions:
    """Request `number`: some greedy, some with several completions, logprobs, or stop strings."""
    chance = random.Random(number)
    prompt = [chance.randrange(LETTERS) for _ in range(chance.randint(2, 40))]
    asked = GenerateOptions(
        token_ids=prompt * chance.randint(1, 2),
        max_tokens=new_tokens,
        temperature=chance.choice((0.0, 0.7, 1.0)),
        seed=number,
    )
    if number % 4 == 1:
        asked["logprobs"] = 0
    if number % 5 == 2:
        asked["stop"] = ["abc", "cab", "eee"]
    if number % 8 == 3:
        asked["n"] = 2
    return asked


@dataclass(slots=True)
class Load:
    """Runs requests and notes how they went.

    said: of each request that came to its end, all its completions. failed: why others did not.
    torn: those whose stream had a gap, a token twice or something else than the completion.
    reconnects: how often a stream was taken up again.
    """

    new_tokens: int
    different: int
    said: dict[int, list[Said]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    torn: list[int] = field(default_factory=list)
    reconnects: int = 0

    async def run(
        self,
        clients: Sequence[AsyncClient],
        numbers: Iterable[int],
        *,
        at_once: int,
        speculation: bool = True,
    ) -> None:
        """Run the requests, `at_once` at a time, each by the next of the clients in turn.

        There are `different` ones: request number `different` is number 0 again.
        """
        waiting = iter(numbers)

        async def one_after_another() -> None:
            for number in waiting:
                asked = options(number % self.different, self.new_tokens)
                asked["speculation"] = speculation
                await self._one(clients[number % len(clients)], number, asked)

        await asyncio.gather(*(one_after_another() for _ in range(at_once)))

    async def _one(self, client: AsyncClient, number: int, asked: GenerateOptions) -> None:
        generation = client.generate(**asked)
        streamed: Counter[int] = Counter()
        ids: dict[int, list[int]] = {}
        whole = True
        try:
            async for chunk in generation:
                whole &= chunk.offset == streamed[chunk.index]
                streamed[chunk.index] += len(chunk.pieces)
                ids.setdefault(chunk.index, []).extend(chunk.token_ids)
            completions = await generation.complete_all()
        except OutriderError as error:
            self.failed[number] = f"{type(error).__name__}: {error.message}"
            return
        finally:
            self.reconnects += generation.reconnects
        self.said[number] = [Said.of(completion) for completion in completions]
        if not whole or any(list(c.token_ids) != ids.get(c.index, []) for c in completions):
            self.torn.append(number)
