"""TLS in front of a server that has none, such as the embedded Valkey."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.support.certificates import tls_of


@asynccontextmanager
async def tls_proxy(directory: Path, part: str, port: int) -> AsyncIterator[int]:
    """Listens with the certificate of a part, wants one of whoever comes; gives its port."""
    tls = tls_of(directory, part)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.cert, tls.key)
    context.load_verify_locations(tls.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    running: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        try:
            there, back = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(_carry(reader, back), _carry(there, writer))
        except OSError:
            writer.close()
        finally:
            running.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()
