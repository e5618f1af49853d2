"""The settings that all services share: their group, TLS to each other and to Redis."""

from dataclasses import dataclass

from outrider.callers import Check, only_named
from outrider.config import setting
from outrider.errors import ConfigError
from outrider.session.redis_tls import RedisTls
from outrider.tls import SYSTEM, Tls, TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisTlsSettings:
    """For whoever speaks to Redis over TLS (rediss://)."""

    redis_ca: str = setting(
        "",
        help="PEM file with the authorities of Redis's certificate, for rediss://; those of the "
        "system if empty.",
    )
    redis_cert: str = setting("", help="PEM file with the certificate to show to Redis.")
    redis_key: str = setting("", help="PEM file with the key of --redis-cert.")

    def redis_tls(self) -> RedisTls:
        """The files, as `outrider.session.redis.connect` takes them."""
        return RedisTls(self.redis_ca, self.redis_cert, self.redis_key)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings(RedisTlsSettings):
    """Whom a service works with, how it shows itself, and who may call it.

    Without the three files: plaintext.
    """

    group: str = setting(
        "",
        help="Coordinators use workers of the same group only; for several models with one Redis.",
    )
    tls_cert: str = setting(
        "",
        help="PEM file with this service's certificate; with --tls-key and --tls-ca it speaks TLS "
        "only.",
    )
    tls_key: str = setting("", help="PEM file with the key of --tls-cert.")
    tls_ca: str = setting(
        "", help="PEM file with the authorities that the certificates of others are checked with."
    )
    allow_peer: tuple[str, ...] = setting(
        (),
        many=True,
        help="Name (DNS or URI) in the certificates of those who may call, * standing for "
        "anything; repeatable; by default the name of the role that calls this service.",
    )

    def __post_init__(self) -> None:
        given = [bool(path) for path in (self.tls_cert, self.tls_key, self.tls_ca)]
        if any(given) and not all(given):
            raise ConfigError("--tls-cert, --tls-key and --tls-ca go together")
        if self.tls_ca == SYSTEM:
            raise ConfigError(
                f"--tls-ca {SYSTEM} would trust everybody's certificates; a service needs a file"
            )
        if self.allow_peer and not any(given):
            raise ConfigError("--allow-peer needs TLS: --tls-cert, --tls-key and --tls-ca")

    def open_tls(self, peer_name: str = "") -> TlsFiles | None:
        """The files, of which those who are called must have `peer_name`; None without TLS.

        Raises:
            ConfigError: a file can't be read or used.
        """
        if not self.tls_ca:
            return None
        return TlsFiles(Tls(ca=self.tls_ca, cert=self.tls_cert, key=self.tls_key, name=peer_name))

    def peer_checks(self, caller: str) -> list[Check]:
        """Lets in who has `caller` in the certificate, or what --allow-peer names instead."""
        return [only_named(self.allow_peer or (caller,))] if self.tls_ca else []
