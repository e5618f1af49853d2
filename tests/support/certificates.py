"""Certificates made on the spot: an authority, and what it issues for a part."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from outrider.tls import Tls

DAY = datetime.timedelta(days=1)
PARTS = ("coordinator", "verify-worker", "draft-worker", "client")


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, in PEM, and its number."""

    cert: bytes
    key: bytes
    serial: int


class Authority:
    """A certification authority."""

    def __init__(self, name: str = "authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        usage = x509.BasicConstraints(ca=True, path_length=None)
        made = _builder(self._name, self._name, self._key, -DAY, DAY)
        made = made.add_extension(usage, critical=True)
        self.cert = _pem(made.sign(self._key, hashes.SHA256()))

    def issue(
        self,
        *names: str,
        since: datetime.timedelta = -DAY,
        until: datetime.timedelta = DAY,
    ) -> Pair:
        """A certificate with DNS names, IP addresses and URIs; valid from now + since on."""
        key = ec.generate_private_key(ec.SECP256R1())
        made = _builder(_name("outrider"), self._name, key, since, until)
        if names:
            alternatives = x509.SubjectAlternativeName([_general(name) for name in names])
            made = made.add_extension(alternatives, critical=False)
        signed = made.sign(self._key, hashes.SHA256())
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return Pair(_pem(signed), private, signed.serial_number)

    def issue_part(self, part: str, **validity: datetime.timedelta) -> Pair:
        """The certificate of a part, which also stands for this machine."""
        return self.issue(f"{part}.outrider", "localhost", "127.0.0.1", **validity)


def write_pair(directory: Path, part: str, pair: Pair) -> None:
    """Put a pair in place as <part>.crt and <part>.key, one after the other."""
    (directory / f"{part}.crt").write_bytes(pair.cert)
    (directory / f"{part}.key").write_bytes(pair.key)


def write_all(directory: Path, authority: Authority) -> Path:
    """The directory with ca.crt and a pair a part."""
    (directory / "ca.crt").write_bytes(authority.cert)
    for part in PARTS:
        write_pair(directory, part, authority.issue_part(part))
    return directory


def tls_of(directory: Path, part: str, name: str = "") -> Tls:
    """The files of a part."""
    cert, key = directory / f"{part}.crt", directory / f"{part}.key"
    return Tls(ca=str(directory / "ca.crt"), cert=str(cert), key=str(key), name=name)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    since: datetime.timedelta,
    until: datetime.timedelta,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + since)
        .not_valid_after(now + until)
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _general(name: str) -> x509.GeneralName:
    if "://" in name:
        return x509.UniformResourceIdentifier(name)
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
