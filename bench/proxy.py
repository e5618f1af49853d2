"""A TCP port in front of another one, on which the network can be bad."""

import asyncio
from contextlib import suppress

CHUNK_BYTES = 64 * 1024


class Proxy:
    """Passes bytes on from `host:port` to `target_host:target_port`; `port` 0 takes a free one.

    `delay_s` holds every piece back that long, each way, which also limits the rate. While it
    holds (`hold`), nothing passes and nobody is told. `cut` breaks every connection at once.
    """

    def __init__(
        self, host: str, port: int, target_port: int, *, target_host: str = "127.0.0.1"
    ) -> None:
        self.host = host
        self.port = port
        self.delay_s = 0.0
        self._target = (target_host, target_port)
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server: asyncio.Server | None = None
        self._transports: set[asyncio.WriteTransport] = set()

    @property
    def connections(self) -> int:
        """How many are open; each has two ends here."""
        return len(self._transports) // 2

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, self.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def hold(self) -> None:
        """Let nothing pass: connections stay, and new ones are taken and hear nothing."""
        self._flowing.clear()

    def release(self) -> None:
        """Let everything pass again, what was held back first."""
        self._flowing.set()

    def cut(self) -> int:
        """Break every connection, what is under way is lost; how many there were."""
        count = self.connections
        for transport in list(self._transports):
            transport.abort()
        return count

    async def stop(self) -> None:
        """Listen no more and break what is open."""
        self.release()
        if self._server is not None:
            self._server.close()
            self.cut()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        transports = [writer.transport]
        try:
            # A connection that is held must not reach the other side either.
            await self._flowing.wait()
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            transports.append(far_writer.transport)
            self._transports.update(transports)
            # gRPC and Redis never close one direction alone: the first end is the end.
            pumps = [
                asyncio.create_task(self._pump(reader, far_writer)),
                asyncio.create_task(self._pump(far_reader, writer)),
            ]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
        except OSError:
            pass  # nobody listens there: ours is broken below, as theirs would have been
        finally:
            for transport in transports:
                transport.abort()
            self._transports.difference_update(transports)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(CHUNK_BYTES):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
