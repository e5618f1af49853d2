"""The settings of every command that speaks to coordinators."""

from dataclasses import dataclass

from outrider.client import DEFAULT_ADDRESS, Client
from outrider.config import setting


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

    def client(self) -> Client:
        """A client of the coordinators."""
        return Client(self.coordinator, tenant=self.tenant)
