"""The proxy on which the network can be bad."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from bench.proxy import Proxy


@pytest.fixture
async def echo() -> AsyncIterator[int]:
    """The port of a server that says everything back."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


@pytest.fixture
async def proxy(echo: int) -> AsyncIterator[Proxy]:
    proxy = Proxy("127.0.0.1", 0, echo)
    await proxy.start()
    yield proxy
    await proxy.stop()


async def say(proxy: Proxy, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(data)
    return reader, writer


async def test_passes_everything_both_ways(proxy: Proxy) -> None:
    data = bytes(range(256)) * 4000
    reader, writer = await say(proxy, data)
    assert await reader.readexactly(len(data)) == data
    assert proxy.connections == 1
    writer.close()


async def test_a_cut_breaks_every_connection_and_lets_new_ones_in(proxy: Proxy) -> None:
    reader, writer = await say(proxy, b"a")
    assert await reader.readexactly(1) == b"a"
    assert proxy.cut() == 1
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    writer.close()
    reader, writer = await say(proxy, b"b")
    assert await reader.readexactly(1) == b"b"
    writer.close()


async def test_what_is_held_back_comes_later(proxy: Proxy) -> None:
    reader, writer = await say(proxy, b"a")
    assert await reader.readexactly(1) == b"a"
    proxy.hold()
    writer.write(b"b")
    late, late_writer = await say(proxy, b"c")
    reads = [asyncio.create_task(r.readexactly(1)) for r in (reader, late)]
    done, _ = await asyncio.wait(reads, timeout=0.2)
    assert done == set()
    proxy.release()
    assert await asyncio.gather(*reads) == [b"b", b"c"]
    writer.close()
    late_writer.close()


async def test_a_delay_holds_each_way(proxy: Proxy) -> None:
    proxy.delay_s = 0.1
    started = time.monotonic()
    reader, writer = await say(proxy, b"a")
    assert await reader.readexactly(1) == b"a"
    assert time.monotonic() - started >= 0.2
    writer.close()


async def test_nobody_behind_it_is_a_connection_that_ends(proxy: Proxy) -> None:
    dead = Proxy("127.0.0.1", 0, 1)
    await dead.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", dead.port)
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    writer.close()
    await dead.stop()
