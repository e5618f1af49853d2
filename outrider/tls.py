"""TLS of gRPC: whom a process trusts and what it shows, read again when the files change.

    Tls         which files, a value
    TlsFiles    what is in them, and the credentials that gRPC takes

A certificate counts for what it names (its DNS and URI names): a worker that is called must have
the name of its role, a caller one that the called one allows (`outrider.callers`).
"""

import os
import ssl
import threading
from dataclasses import dataclass
from typing import Any

import grpc

from outrider.errors import ConfigError
from outrider.reloading import Reloaded, read_file

# Instead of a file: the certification authorities that gRPC brings along.
SYSTEM = "system"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Files in PEM, which are read again when they change.

    ca: the authorities that the other side's certificate is checked against, or "system" for
        those that gRPC brings along.
    cert, key: what is shown to the other side, with the certificates between it and the
        authority; the key is not encrypted. Empty: nothing is shown.
    name: the DNS name that the certificate of who is called must have; empty: the host that is
        called.

    Raises:
        ConfigError: only one of `cert` and `key`, or no `ca`.
    """

    ca: str
    cert: str = ""
    key: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        if not self.ca:
            raise ConfigError(f"TLS needs --tls-ca FILE, or `{SYSTEM}` to call a public service")
        if bool(self.cert) is not bool(self.key):
            raise ConfigError("--tls-cert and --tls-key go together")


@dataclass(frozen=True, slots=True)
class _Content:
    ca: bytes | None
    cert: bytes | None
    key: bytes | None


class TlsFiles:
    """The credentials of a process; threads may share it.

    Raises:
        ConfigError: a file can't be read or used.
    """

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        paths = [path for path in (tls.ca, tls.cert, tls.key) if path not in ("", SYSTEM)]
        self._files = Reloaded(paths, lambda: _read(tls), what="the TLS certificate")
        self._lock = threading.Lock()
        self._made: tuple[int, grpc.ChannelCredentials] | None = None

    def options_for(self, host: str = "") -> list[tuple[str, Any]]:
        """What a channel needs besides credentials.

        `host` is what certificates must name where `Tls.name` says nothing; empty: the host that
        the channel connects to.
        """
        name = self._tls.name or host
        return [("grpc.ssl_target_name_override", name)] if name else []

    def channel_credentials(self) -> tuple[int, grpc.ChannelCredentials]:
        """For a channel that is opened now, with a number that rises when the files change."""
        generation, content = self._files.versioned()
        with self._lock:
            if self._made is None or self._made[0] != generation:
                made = grpc.ssl_channel_credentials(content.ca, content.key, content.cert)
                self._made = generation, made
            return self._made

    def server_credentials(self, *, require_client: bool) -> grpc.ServerCredentials:
        """For a server; each connection that comes gets what the files say then.

        `require_client`: whoever connects must show a certificate of the authorities.

        Raises:
            ConfigError: there is no certificate, or no authority of one's own.
        """
        told, content = self._files.versioned()
        if content.cert is None or content.ca is None:
            raise ConfigError("a server needs --tls-cert, --tls-key and --tls-ca with files")

        def changed() -> Any:  # None is "as before", which the type hints do not know
            nonlocal told
            generation, content = self._files.versioned()
            if generation == told:
                return None
            told = generation
            return _server_configuration(content)

        return grpc.dynamic_ssl_server_credentials(
            _server_configuration(content), changed, require_client
        )


def _server_configuration(content: _Content) -> grpc.ServerCertificateConfiguration:
    assert content.key is not None
    assert content.cert is not None
    return grpc.ssl_server_certificate_configuration([(content.key, content.cert)], content.ca)


def _read(tls: Tls) -> _Content:
    """What is in the files, if it is complete and fits."""
    content = _read_files(tls)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if content.ca is not None:
        load_authorities(context, content.ca, f"--tls-ca {tls.ca}")
    if tls.cert:
        load_pair(context, tls.cert, tls.key, "--tls-cert", "--tls-key")
    if content != _read_files(tls):
        raise ConfigError("the TLS files change while they are read")
    return content


def _read_files(tls: Tls) -> _Content:
    return _Content(
        ca=None if tls.ca == SYSTEM else read_file(tls.ca, "--tls-ca"),
        cert=read_file(tls.cert, "--tls-cert") if tls.cert else None,
        key=read_file(tls.key, "--tls-key") if tls.key else None,
    )


def load_authorities(context: ssl.SSLContext, pem: bytes, what: str) -> None:
    """Have a context trust the certificates of a PEM file.

    Raises:
        ConfigError: there are none, or one is broken.
    """
    try:
        context.load_verify_locations(cadata=pem.decode("ascii", "replace"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"{what} has no certificates that can be used: {error}") from error


def load_pair(context: ssl.SSLContext, cert: str, key: str, cert_flag: str, key_flag: str) -> None:
    """Have a context show a certificate, after checking that the key is its key.

    Raises:
        ConfigError: they can't be read, or don't fit.
    """
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(
            os.path.expanduser(cert), os.path.expanduser(key), password=lambda: ""
        )
    except (OSError, ValueError) as error:  # an ssl.SSLError is an OSError
        raise ConfigError(
            f"{cert_flag} {cert} and {key_flag} {key} can't be used together: {error}"
        ) from error
