import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from coordinator.prefixes import PrefixLookup
from outrider.errors import RecordsUnavailableError
from outrider.session.prefixes import Holder, Prefix, PrefixDirectory
from outrider.session.registry import Pool, WorkerRecord

TEXT = list(range(200))


def worker(worker_id: str, incarnation: str = "i1", kv: str = "kv") -> WorkerRecord:
    return WorkerRecord(
        Pool.VERIFY, worker_id, "h:1", incarnation, "m", "f", "", 8, 0, False, 64, kv
    )


class Directory(PrefixDirectory):
    """Answers what `answer` says and counts the questions."""

    def __init__(
        self, answer: Callable[[Sequence[Prefix]], Coroutine[Any, Any, list[frozenset[Holder]]]]
    ) -> None:
        self._answer = answer
        self.asked: list[Sequence[Prefix]] = []

    async def holders(self, prefixes: Sequence[Prefix]) -> list[frozenset[Holder]]:
        self.asked.append(prefixes)
        return await self._answer(prefixes)


async def by_length(prefixes: Sequence[Prefix]) -> list[frozenset[Holder]]:
    """`long` has 128 tokens, `short` 64; each also under its other name and fingerprint."""
    return [
        frozenset(
            Holder(worker_id, "i1")
            for worker_id, tokens in {"long": 128, "short": 64}.items()
            if prefix.tokens <= tokens and prefix.kv_fingerprint == "kv"
        )
        for prefix in prefixes
    ]


async def test_the_longest_prefix_of_each_worker() -> None:
    directory = Directory(by_length)
    workers = [worker("long"), worker("short"), worker("none")]
    held = await PrefixLookup(directory).held_tokens(TEXT, workers)
    assert held == {"long": 128, "short": 64, "none": 0}
    assert [[prefix.tokens for prefix in asked] for asked in directory.asked] == [[64, 128, 192]]


async def test_what_another_incarnation_or_other_numerics_left_does_not_count() -> None:
    workers = [worker("long", "i2"), worker("short", kv="other"), worker("cacheless", kv="")]
    directory = Directory(by_length)
    held = await PrefixLookup(directory).held_tokens(TEXT, workers)
    assert set(held.values()) == {0}
    # Still one question.
    assert len(directory.asked) == 1


@pytest.mark.parametrize(
    ("tokens", "workers"),
    [
        (TEXT, [worker("long")]),
        (TEXT, []),
        (TEXT[:63], [worker("long"), worker("short")]),
        (TEXT, [worker("long", kv=""), worker("short", kv="")]),
    ],
)
async def test_nothing_is_asked_where_the_answer_decides_nothing(
    tokens: list[int], workers: list[WorkerRecord]
) -> None:
    directory = Directory(by_length)
    assert await PrefixLookup(directory).held_tokens(tokens, workers) == {}
    assert directory.asked == []


async def test_a_redis_that_does_not_answer_is_not_waited_for() -> None:
    async def never(_: Sequence[Prefix]) -> list[frozenset[Holder]]:
        await asyncio.Event().wait()
        raise AssertionError

    async def unavailable(_: Sequence[Prefix]) -> list[frozenset[Holder]]:
        raise RecordsUnavailableError("Redis does not answer")

    workers = [worker("long"), worker("short")]
    for answer in (never, unavailable):
        directory = Directory(answer)
        assert await PrefixLookup(directory, 0.01).held_tokens(TEXT, workers) == {}
        assert len(directory.asked) == 1
