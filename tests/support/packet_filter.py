"""The kernel's packet filter in a namespace: what may come in or go out, counted by rule."""

import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pyroute2.nftables.main import NFTables

from tests.support.namespaces import Host, apart

TABLE = "policy"
HOOKS = {"ingress": "input", "egress": "output"}
PROTOCOLS = {"TCP": socket.IPPROTO_TCP, "UDP": socket.IPPROTO_UDP}
# Of the kernel: linux/netfilter/nf_tables.h and nf_conntrack_common.h.
INET = 1
ACCEPT = 1
EQUAL, UNEQUAL = 0, 1
NETWORK_HEADER, TRANSPORT_HEADER = 1, 2
SOURCE, DESTINATION = 12, 16
DESTINATION_PORT = 2
# Interfaces by their index: where a packet comes in, where it goes out.
META_IN, META_OUT, META_PROTOCOL = 4, 5, 16
CT_STATE, CT_GOES_ON = 0, 0b110
ICMPX, PROHIBITED = 2, 3
Expression = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Allowed:
    """Connections with one address and port: from it (ingress) or to it (egress)."""

    direction: str
    peer: str
    protocol: str
    port: int


def _expression(name: str, **attributes: Any) -> Expression:
    prefix = f"NFTA_{name.upper()}"
    values = [(f"{prefix}_{key.upper()}", value) for key, value in attributes.items()]
    return {"attrs": [("NFTA_EXPR_NAME", name), ("NFTA_EXPR_DATA", {"attrs": values})]}


def _data(value: bytes) -> dict[str, Any]:
    return {"attrs": [("NFTA_DATA_VALUE", value)]}


def _is(value: bytes, how: int = EQUAL) -> Expression:
    return _expression("cmp", sreg=1, op=how, data=_data(value))


def _accept() -> Expression:
    verdict = {"attrs": [("NFTA_DATA_VERDICT", {"attrs": [("NFTA_VERDICT_CODE", ACCEPT)]})]}
    return _expression("immediate", dreg=0, data=verdict)


def _goes_on() -> list[Expression]:
    """Whatever belongs to a connection that was let through."""
    mask = struct.pack("=I", CT_GOES_ON)
    return [
        _expression("ct", key=CT_STATE, dreg=1),
        _expression("bitwise", sreg=1, dreg=1, len=4, mask=_data(mask), xor=_data(bytes(4))),
        _is(bytes(4), UNEQUAL),
        _accept(),
    ]


def _own(direction: str) -> list[Expression]:
    """What a host says to itself; its loopback has the index 1."""
    key = META_IN if direction == "ingress" else META_OUT
    return [_expression("meta", key=key, dreg=1), _is(struct.pack("=I", 1)), _accept()]


def _allowed(one: Allowed) -> list[Expression]:
    where = SOURCE if one.direction == "ingress" else DESTINATION
    return [
        _expression("meta", key=META_PROTOCOL, dreg=1),
        _is(bytes([PROTOCOLS[one.protocol]])),
        _expression("payload", dreg=1, base=NETWORK_HEADER, offset=where, len=4),
        _is(socket.inet_aton(one.peer)),
        _expression("payload", dreg=1, base=TRANSPORT_HEADER, offset=DESTINATION_PORT, len=2),
        _is(struct.pack("!H", one.port)),
        _expression("counter"),
        _accept(),
    ]


def restrict(host: Host, direction: str, allowed: Iterable[Allowed]) -> None:
    """Have a host refuse all else in one direction, at once: whoever tries is told."""
    refuse = [_expression("reject", type=ICMPX, icmp_code=PROHIBITED)]
    rules = [_goes_on(), _own(direction), *map(_allowed, allowed), refuse]

    def add() -> None:
        with host.inside(), NFTables(nfgen_family=INET) as nft:
            nft.table("add", name=TABLE)
            nft.chain("add", table=TABLE, name=direction, hook=HOOKS[direction], policy=ACCEPT)
            for rule in rules:
                nft.rule("add", table=TABLE, chain=direction, expressions=(rule,))

    apart(add)


def connections(host: Host, direction: str) -> list[int]:
    """How many each of the rules of `restrict` has let through, in their order."""

    def read() -> list[int]:
        with host.inside(), NFTables(nfgen_family=INET) as nft:
            rules = nft.get_rules()
            return [n for rule in rules if _of(rule, direction) for n in _counted(rule)]

    return apart(read)


def _of(rule: Any, direction: str) -> bool:
    return bool(rule.get_attr("NFTA_RULE_CHAIN") == direction)


def _counted(rule: Any) -> Iterator[int]:
    for one in rule.get_attr("NFTA_RULE_EXPRESSIONS"):
        if one.get_attr("NFTA_EXPR_NAME") == "counter":
            yield int(one.get_attr("NFTA_EXPR_DATA").get_attr("NFTA_COUNTER_PACKETS"))
