"""Which coordinators there are and which to ask first; no input or output.

An address is what the caller names, host:port; an endpoint is what a channel connects to, one
for each IP address that the name of the host stands for.
"""

import ipaddress
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider import rpc
from outrider.errors import ConfigError, UnavailableError

# One that failed is asked last for so long.
AVOID_S = 30.0
# A name is looked up again when one of its endpoints has failed, but not more often.
RESOLVE_AGAIN_S = 1.0


@dataclass(slots=True)
class _Name:
    address: str
    host: str
    port: int
    endpoints: list[str]
    looked_up_at: float | None = None
    # Why it has no endpoints.
    why: str = ""


class Directory:
    """The coordinators of a client, in the order in which they are named.

    The endpoints of one name come in random order. Methods are short and leave nothing half
    done, so threads may share it.

    Raises:
        ConfigError: an address without a port, or none at all.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        clock: Callable[[], float] = time.monotonic,
        shuffle: Callable[[list[str]], None] = random.shuffle,
    ) -> None:
        self.addresses = (addresses,) if isinstance(addresses, str) else tuple(addresses)
        if not self.addresses:
            raise ConfigError("a client needs the address of a coordinator")
        self._clock = clock
        self._shuffle = shuffle
        self._names = [_name_of(address) for address in self.addresses]
        self._failed_at: dict[str, float] = {}

    def __str__(self) -> str:
        return ", ".join(self.addresses)

    def to_resolve(self) -> list[tuple[str, str, int]]:
        """(address, host, port) of the names to be looked up before `endpoints` is called."""
        now = self._clock()
        return [(n.address, n.host, n.port) for n in self._names if self._is_stale(n, now)]

    def learn(self, address: str, ip_addresses: Sequence[str], why: str = "") -> None:
        """What a name stands for now; nothing, and `why`, keeps what it stood for before."""
        for name in self._names:
            if name.address != address:
                continue
            name.looked_up_at, name.why = self._clock(), why
            found = [rpc.address_of(ip, name.port) for ip in dict.fromkeys(ip_addresses)]
            if set(found) != set(name.endpoints) and found:
                self._shuffle(found)
                name.endpoints = found

    def endpoints(self) -> list[str]:
        """Every endpoint: first those that have not failed of late, then the longest healed."""
        now = self._clock()
        found = dict.fromkeys(endpoint for name in self._names for endpoint in name.endpoints)

        def failed_at(endpoint: str) -> float:
            at = self._failed_at.get(endpoint)
            return at if at is not None and now - at < AVOID_S else -1.0

        return sorted(found, key=failed_at)

    def first(self) -> str:
        """The endpoint to ask next.

        Raises:
            UnavailableError: there is none: no name has an address.
        """
        endpoints = self.endpoints()
        if not endpoints:
            reasons = "; ".join(f"{name.address}: {name.why}" for name in self._names)
            raise UnavailableError(f"no coordinator's name has an IP address: {reasons}")
        return endpoints[0]

    def host_of(self, endpoint: str) -> str:
        """The host name that the endpoint came from; empty when it was given as an IP address."""
        return next((name.host for name in self._names if endpoint in name.endpoints), "")

    def failed(self, endpoint: str) -> None:
        """It did not answer, or did not want to."""
        self._failed_at[endpoint] = self._clock()

    def worked(self, endpoint: str) -> None:
        """It answered."""
        self._failed_at.pop(endpoint, None)

    def _is_stale(self, name: _Name, now: float) -> bool:
        if not name.host:
            return False
        if name.looked_up_at is None:
            return True
        if now - name.looked_up_at < RESOLVE_AGAIN_S:
            return False
        failed_at = (self._failed_at.get(endpoint, -1.0) for endpoint in name.endpoints)
        return not name.endpoints or max(failed_at) >= name.looked_up_at


def _name_of(address: str) -> _Name:
    rpc.check_address(address)
    host, _, port = address.rpartition(":")
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return _Name(address, host, int(port), [])
    return _Name(address, "", int(port), [address])
