"""Who a client is to coordinators, and the channels that it has to them."""

import ipaddress
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

import grpc

from outrider.errors import ConfigError
from outrider.tls import Tls, TlsFiles

TENANT_KEY = "outrider-tenant"
TOKEN_KEY = "authorization"

Metadata: TypeAlias = tuple[tuple[str, str], ...]
Options: TypeAlias = list[tuple[str, Any]]
C = TypeVar("C")
EXPOSED = "the token travels in plaintext, where others can read it; use TLS"


class PlaintextTokenWarning(UserWarning):
    """A token is sent to another machine without TLS."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who the client is, and how it makes sure of the coordinators.

    Raises:
        ConfigError: tenant or token are not plain text, or a file of `tls` can't be used.
    """

    tenant: str = ""
    token: str = field(default="", repr=False)
    tls: Tls | None = None

    @property
    def metadata(self) -> Metadata:
        """What every call carries."""
        if not _is_plain(self.tenant):
            raise ConfigError(
                f"a tenant is printable ASCII without spaces around it, not {self.tenant!r}"
            )
        if not _is_plain(self.token):
            raise ConfigError("a token is printable ASCII without spaces around it")
        tenant = ((TENANT_KEY, self.tenant),) if self.tenant else ()
        return (*tenant, *(((TOKEN_KEY, f"Bearer {self.token}"),) if self.token else ()))

    def warn_if_exposed(self, addresses: Iterable[str]) -> None:
        """Warn whoever made the client when others can read the token on its way."""
        hosts = [address.rpartition(":")[0].strip("[]") for address in addresses]
        if self.token and self.tls is None and not all(map(_is_here, hosts)):
            warnings.warn(EXPOSED, PlaintextTokenWarning, stacklevel=4)


def _is_plain(text: str) -> bool:
    return text.isascii() and (not text or text.isprintable()) and text == text.strip()


def _is_here(host: str) -> bool:
    """Whether a host is this machine, as far as its name tells."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Channels(Generic[C]):
    """A channel an endpoint, made anew when the TLS files have changed since.

    What runs on a former channel goes on there. Not for threads without a lock.
    """

    def __init__(
        self,
        tls: Tls | None,
        open_channel: Callable[[str, grpc.ChannelCredentials | None, Options], C],
    ) -> None:
        self._tls = tls and TlsFiles(tls)
        self._open_channel = open_channel
        self._made: dict[str, tuple[int, C]] = {}
        self.all: list[C] = []

    def get(self, endpoint: str, host: str) -> tuple[C, bool]:
        """The channel to an endpoint, and whether it is a new one.

        `host` is what the endpoint was called, which is what its certificate has to name.
        """
        generation, credentials = self._tls.channel_credentials() if self._tls else (0, None)
        made = self._made.get(endpoint)
        if made is not None and made[0] == generation:
            return made[1], False
        options = self._tls.options_for(host) if self._tls else []
        channel = self._open_channel(endpoint, credentials, options)
        self._made[endpoint] = generation, channel
        self.all.append(channel)
        return channel, True
