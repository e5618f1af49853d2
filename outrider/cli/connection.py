"""The settings of every command that speaks to coordinators."""

import warnings
from dataclasses import dataclass

import click

from outrider.client import DEFAULT_ADDRESS, Client
from outrider.config import setting
from outrider.errors import ConfigError
from outrider.reloading import read_file
from outrider.tls import Tls


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings:
    """Whom to ask."""

    coordinator: tuple[str, ...] = setting(
        (DEFAULT_ADDRESS,),
        many=True,
        help="Address of a coordinator, HOST:PORT; repeatable, in the order in which to ask them. "
        "A host name with several addresses stands for several.",
    )
    tenant: str = setting("", help="Whose sessions they are.")
    token: str = setting(
        "",
        secret=True,
        help="Token that says who asks; better given in the environment, which others can't see.",
    )
    token_file: str = setting("", help="File with the token.")
    tls_ca: str = setting(
        "",
        help="PEM file with the authorities that coordinators' certificates are checked with, or "
        "`system`; switches TLS on.",
    )
    tls_cert: str = setting("", help="PEM file with the certificate to show to coordinators.")
    tls_key: str = setting("", help="PEM file with the key of --tls-cert.")
    tls_name: str = setting(
        "", help="DNS name that the coordinators' certificates have; the host asked if empty."
    )

    def client(self) -> Client:
        """A client of the coordinators; says so when others could read the token.

        Raises:
            ConfigError: the settings don't fit, or a file can't be used.
        """
        if self.token and self.token_file:
            raise ConfigError("--token and --token-file: one of them is enough")
        token = self.token
        if self.token_file:
            token = read_file(self.token_file, "--token-file").decode("utf-8", "replace").strip()
        with warnings.catch_warnings(record=True, action="always") as caught:
            made = Client(self.coordinator, tenant=self.tenant, token=token, tls=self.tls())
        for warning in caught:
            click.echo(f"outrider: {warning.message}: --tls-ca FILE", err=True)
        return made

    def tls(self) -> Tls | None:
        """How coordinators are made sure of; None without --tls-ca."""
        if not self.tls_ca and (self.tls_cert or self.tls_key or self.tls_name):
            raise ConfigError("--tls-cert, --tls-key and --tls-name need --tls-ca")
        if not self.tls_ca:
            return None
        return Tls(ca=self.tls_ca, cert=self.tls_cert, key=self.tls_key, name=self.tls_name)
