"""What NetworkPolicies say, as Kubernetes reads them, in terms of addresses and ports."""

import ipaddress
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.packet_filter import Allowed

Manifest = dict[str, Any]
# The label that every namespace has.
NAMESPACE_NAME = "kubernetes.io/metadata.name"
DIRECTIONS = {"ingress": "from", "egress": "to"}


@dataclass(frozen=True, slots=True)
class Place:
    """A pod, whatever runs in it, and where it is."""

    name: str
    namespace: str
    labels: Mapping[str, str]
    address: str


def chooses(selector: Manifest, labels: Mapping[str, str]) -> bool:
    """Whether a label selector chooses what has these labels."""
    wanted = selector.get("matchLabels", {})
    for one in selector.get("matchExpressions", []):
        assert one["operator"] == "In", one
        if labels.get(one["key"]) not in one["values"]:
            return False
    return all(labels.get(key) == value for key, value in wanted.items())


def _is_peer(peer: Manifest, own_namespace: str, place: Place) -> bool:
    if block := peer.get("ipBlock"):
        address = ipaddress.ip_address(place.address)
        excluded = any(address in ipaddress.ip_network(n) for n in block.get("except", []))
        return address in ipaddress.ip_network(block["cidr"]) and not excluded
    if "namespaceSelector" in peer:
        if not chooses(peer["namespaceSelector"], {NAMESPACE_NAME: place.namespace}):
            return False
    elif place.namespace != own_namespace:
        return False
    return chooses(peer.get("podSelector", {}), place.labels)


def _allowed(
    rule: Manifest, direction: str, own_namespace: str, places: Sequence[Place]
) -> Iterator[Allowed]:
    peers = rule.get(DIRECTIONS[direction])
    for place in places:
        if peers and not any(_is_peer(peer, own_namespace, place) for peer in peers):
            continue
        # A rule without ports would allow all of them: the filter has no word for it.
        for port in rule["ports"]:
            yield Allowed(direction, place.address, port.get("protocol", "TCP"), port["port"])


def restrictions(
    policies: Iterable[Manifest], namespace: str, of: Place, places: Sequence[Place]
) -> dict[str, list[Allowed]]:
    """By direction, all that a pod may do; a direction that no policy is about is not there.

    The policies are those of a namespace, `places` all pods that there are.
    """
    found: dict[str, list[Allowed]] = {}
    for policy in policies:
        spec = policy["spec"]
        if namespace != of.namespace or not chooses(spec["podSelector"], of.labels):
            continue
        for direction in DIRECTIONS:
            if direction.capitalize() not in spec["policyTypes"]:
                continue
            rules = found.setdefault(direction, [])
            for rule in spec.get(direction, []):
                rules += _allowed(rule, direction, namespace, places)
    return found
