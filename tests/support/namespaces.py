"""Network namespaces on one switch: a host for each part, and none of them sees the outside.

Nothing of it has a name in the file system, so that all is gone with the process.
"""

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from socket import AF_INET, SOCK_STREAM, SocketKind, socket
from types import TracebackType
from typing import Self, TypeVar

from pyroute2 import IPRoute

from tests.support import enter_namespace

T = TypeVar("T")
# Of nobody (RFC 5737).
NETWORK, PREFIX = "192.0.2.{}", 24
_LIBC = ctypes.CDLL(None, use_errno=True)


def forbidden() -> str:
    """Why namespaces can't be made here; empty when they can."""
    try:
        os.close(_new(_here()))
    except OSError as error:
        return f"no network namespace can be made: {error}"
    return ""


def _here() -> int:
    """A file that stands for the namespace of this thread."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _call(name: str, *arguments: int) -> None:
    if getattr(_LIBC, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


@contextmanager
def _inside(namespace: int) -> Iterator[None]:
    home = _here()
    _call("setns", namespace, enter_namespace.CLONE_NEWNET)
    try:
        yield
    finally:
        _call("setns", home, enter_namespace.CLONE_NEWNET)
        os.close(home)


def _new(home: int) -> int:
    _call("unshare", enter_namespace.CLONE_NEWNET)
    namespace = _here()
    _call("setns", home, enter_namespace.CLONE_NEWNET)
    os.close(home)
    return namespace


def apart(work: Callable[[], T]) -> T:
    """Do it in another thread: pyroute2 has an event loop of its own, and a thread has only one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


class Host:
    """A namespace with one address, `address`, on the switch."""

    def __init__(self, namespace: int, address: str) -> None:
        self.address = address
        self._namespace = namespace

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Sockets that are made meanwhile belong to it for good; nothing may be awaited."""
        with _inside(self._namespace):
            yield

    def open(self, kind: SocketKind = SOCK_STREAM) -> socket:
        """A socket of this host, which does not block."""
        with self.inside():
            made = socket(AF_INET, kind)
        made.setblocking(False)
        return made

    def listen(self, port: int) -> socket:
        """A socket that listens on all addresses of this host."""
        made = self.open()
        made.bind(("0.0.0.0", port))
        made.listen(64)
        return made

    def command(self, resolv_conf: Path, command: Sequence[str], python: str) -> list[str]:
        """The command line that runs a command here."""
        namespace = f"/proc/{os.getpid()}/fd/{self._namespace}"
        return [python, "-I", "-S", enter_namespace.__file__, namespace, str(resolv_conf), *command]


class Network:
    """The switch and its hosts, which are there until the `with` block and their processes end."""

    def __init__(self) -> None:
        self._made: list[int] = []

    def __enter__(self) -> Self:
        return self

    def _add_switch(self) -> None:
        self._switch = _new(_here())
        self._made.append(self._switch)
        with _inside(self._switch), IPRoute() as link:
            link.link("add", ifname="switch", kind="bridge")
            self._bridge = link.link_lookup(ifname="switch")[0]
            link.link("set", index=self._bridge, state="up")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for namespace in self._made:
            os.close(namespace)

    def add_host(self) -> Host:
        """Another host."""
        return apart(self._add_host)

    def _add_host(self) -> Host:
        if not self._made:
            self._add_switch()
        number = len(self._made)
        namespace = _new(_here())
        self._made.append(namespace)
        with _inside(self._switch), IPRoute() as link:
            name, other = f"port{number}", {"ifname": "eth0", "net_ns_fd": namespace}
            link.link("add", ifname=name, kind="veth", peer=other)
            port = link.link_lookup(ifname=name)[0]
            link.link("set", index=port, master=self._bridge, state="up")
        with _inside(namespace), IPRoute() as link:
            device = link.link_lookup(ifname="eth0")[0]
            link.addr("add", index=device, address=NETWORK.format(number), prefixlen=PREFIX)
            for name in ("lo", "eth0"):
                link.link("set", index=link.link_lookup(ifname=name)[0], state="up")
        return Host(namespace, NETWORK.format(number))
