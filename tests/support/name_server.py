"""A name server that knows a few names; what it answers over UDP is always cut short.

So whoever asks has to ask again over TCP, as for a name with many addresses.
"""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from tests.support.namespaces import Host

PORT = 53
A = 1
TTL_S = 5
REPLY, TRUNCATED, UNKNOWN = 0x8180, 0x0200, 3
# Of the name in the question.
POINTER = 0xC00C


def answer(names: Mapping[str, str], asked: bytes, *, short: bool) -> bytes:
    """The reply to a query of one question."""
    labels, at = [], 12
    while length := asked[at]:
        labels.append(asked[at + 1 : at + 1 + length].decode().lower())
        at += 1 + length
    end = at + 5
    (kind,) = struct.unpack("!H", asked[at + 1 : at + 3])
    address = names.get(".".join(labels))
    flags = REPLY | (TRUNCATED if short else 0) | (UNKNOWN if address is None else 0)
    records = b""
    if address is not None and kind == A and not short:
        head = struct.pack("!HHHIH", POINTER, A, 1, TTL_S, 4)
        records = head + socket.inet_aton(address)
    counts = struct.pack("!HHHH", 1, bool(records), 0, 0)
    return asked[:2] + struct.pack("!H", flags) + counts + asked[12:end] + records


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self._transport.sendto(answer(self._names, data, short=True), addr)


@asynccontextmanager
async def name_server(host: Host, names: Mapping[str, str]) -> AsyncIterator[None]:
    """Answers on a host; `names` may grow."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                (length,) = struct.unpack("!H", await reader.readexactly(2))
                reply = answer(names, await reader.readexactly(length), short=False)
                writer.write(struct.pack("!H", len(reply)) + reply)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            # The last one: streams complain of a handler that was cancelled in the end.
            writer.close()

    datagrams = host.open(socket.SOCK_DGRAM)
    datagrams.bind(("0.0.0.0", PORT))
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(lambda: _Datagrams(names), sock=datagrams)
    server = await asyncio.start_server(serve, sock=host.listen(PORT))
    try:
        yield
    finally:
        server.close()
        transport.close()
