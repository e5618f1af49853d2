"""Ports of this machine: which are free, and who answers."""

import asyncio
import random
import socket

from outrider.errors import AddressInUseError

# Below the ports that systems give to outgoing connections, and Kubernetes to node ports: what is
# free here stays free until its process listens, and while that process is restarted.
STEADY_PORTS = range(20_000, 30_000)
TRIES = 100


def take_port(host: str, port: int) -> int:
    """The port itself if nobody listens on it; one of `STEADY_PORTS` that is free for 0.

    Raises:
        AddressInUseError: the port is taken, or it is not ours to take.
    """
    if port:
        return _take(host, port)
    for number in random.SystemRandom().sample(STEADY_PORTS, TRIES):
        try:
            return _take(host, number)
        except AddressInUseError as error:
            taken = error
    raise taken


def _take(host: str, port: int) -> int:
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise AddressInUseError(
                f"can't listen on {host}:{port}: {error.strerror}; "
                "stop what uses the port, or choose another one with --port"
            ) from error
        return int(probe.getsockname()[1])


async def listens(host: str, port: int) -> bool:
    """Whether somebody accepts connections there."""
    try:
        _, writer = await asyncio.open_connection(host.strip("[]"), port)
    except OSError:
        return False
    writer.close()
    return True
