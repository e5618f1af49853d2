"""Plain connections from rank 0 to every other rank, for messages.

A collective waits until the others are there for it, and goes through a thread of its own; a
message is on its way as soon as it is written.
"""

import secrets
import socket
import time
from collections.abc import Sequence
from typing import Any, Self

_LENGTH_BYTES = 8
_SECRET_BYTES = 16
# How long whoever connects may take to say the secret.
_SECRET_S = 5.0
_LEAST_S = 0.001
_KEY = "messages"


class Wires:
    """One rank's side: on rank 0 a connection to each other rank, elsewhere one to rank 0.

    Raises (all methods): OSError, when a connection is closed or nothing comes in time.
    """

    def __init__(self, connections: Sequence[socket.socket]) -> None:
        self._connections = connections
        for connection in connections:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def meet(cls, store: Any, rank: int, size: int, address: str, start_s: float) -> Self:
        """Connect, by a port and a secret that are left at the store."""
        if rank == 0:
            return cls(_accept(store, size, address, start_s))
        host, port, secret = store.get(_KEY).decode().rsplit(" ", 2)
        own = cls([socket.create_connection((host, int(port)), timeout=start_s)])
        own._connections[0].sendall(bytes.fromhex(secret))
        return own

    def send(self, message: bytes, limit_s: float) -> None:
        """From rank 0 to all others."""
        framed = len(message).to_bytes(_LENGTH_BYTES, "little") + message
        for connection in self._connections:
            connection.settimeout(limit_s)
            connection.sendall(framed)

    def receive(self, limit_s: float) -> bytes:
        """The next message of rank 0."""
        (connection,) = self._connections
        connection.settimeout(limit_s)
        length = int.from_bytes(_exactly(connection, _LENGTH_BYTES), "little")
        return _exactly(connection, length)

    def close(self) -> None:
        """The others learn of it at once."""
        for connection in self._connections:
            connection.close()

    def __del__(self) -> None:
        self.close()


def _accept(store: Any, size: int, address: str, start_s: float) -> list[socket.socket]:
    """The connections of all others; whoever does not know the secret is none of them."""
    secret = secrets.token_bytes(_SECRET_BYTES)
    found: list[socket.socket] = []
    until_s = time.monotonic() + start_s
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=size) as server:
        port = server.getsockname()[1]
        store.set(_KEY, f"{address} {port} {secret.hex()}")
        try:
            while len(found) < size - 1:
                server.settimeout(max(until_s - time.monotonic(), _LEAST_S))
                connection, _ = server.accept()
                if _knows(connection, secret):
                    found.append(connection)
                else:
                    connection.close()
        except OSError:
            for connection in found:
                connection.close()
            raise
    return found


def _knows(connection: socket.socket, secret: bytes) -> bool:
    connection.settimeout(_SECRET_S)
    try:
        return secrets.compare_digest(_exactly(connection, len(secret)), secret)
    except OSError:
        return False


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            raise ConnectionError("Connection closed by peer")
        parts += part
    return bytes(parts)
