"""TLS to Redis with files that may change: every new connection gets what they say then."""

import ssl
from dataclasses import dataclass
from typing import Any

import redis.asyncio as redis_asyncio
from redis.asyncio.connection import RedisSSLContext

from outrider.errors import ConfigError
from outrider.reloading import Reloaded, read_file
from outrider.tls import load_authorities, load_pair


@dataclass(frozen=True, slots=True)
class RedisTls:
    """PEM files: the authorities of Redis's certificate, and what is shown to Redis.

    Empty ones: the system's authorities, and nothing is shown.
    """

    ca: str = ""
    cert: str = ""
    key: str = ""


def use_tls(pool: redis_asyncio.ConnectionPool, contexts: "TlsContexts | None") -> None:
    """Have the connections of a pool, of which there are none yet, ask for their context.

    Raises:
        ConfigError: the pool's URL is not one of TLS.
    """
    if contexts is None:
        return
    if not issubclass(pool.connection_class, redis_asyncio.SSLConnection):
        raise ConfigError(
            "--redis-ca, --redis-cert and --redis-key need a --redis-url of rediss://"
        )
    pool.connection_kwargs["contexts"] = contexts
    pool.connection_class = _TlsConnection


def open_contexts(tls: RedisTls | None) -> "TlsContexts | None":
    """The contexts that the files make; None where there are no files.

    Raises:
        ConfigError: a file can't be used.
    """
    return None if tls is None or tls == RedisTls() else TlsContexts(tls)


class TlsContexts(RedisSSLContext):
    """Whom connections ask for a context, each time that they connect."""

    __slots__ = ("_files",)

    def __init__(self, tls: RedisTls) -> None:
        super().__init__(cert_reqs=ssl.CERT_REQUIRED, check_hostname=True)
        paths = [path for path in (tls.ca, tls.cert, tls.key) if path]
        self._files = Reloaded(paths, lambda: _context(tls), what="the TLS certificate for Redis")

    def get(self) -> ssl.SSLContext:
        """The context of the last good files."""
        return self._files.get()


class _TlsConnection(redis_asyncio.SSLConnection):
    """A connection that asks for its TLS context whenever it connects."""

    def __init__(self, *, contexts: TlsContexts, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ssl_context = contexts


def _context(tls: RedisTls) -> ssl.SSLContext:
    if bool(tls.cert) is not bool(tls.key):
        raise ConfigError("--redis-cert and --redis-key go together")
    context = ssl.create_default_context()
    if tls.ca:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        load_authorities(context, read_file(tls.ca, "--redis-ca"), f"--redis-ca {tls.ca}")
    if tls.cert:
        load_pair(context, tls.cert, tls.key, "--redis-cert", "--redis-key")
    return context
