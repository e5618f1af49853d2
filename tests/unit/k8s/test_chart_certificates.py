"""Certificates and roles: what the chart asks for is what services and probes check."""

from collections.abc import Callable
from fnmatch import fnmatchcase

import pytest

from tests.support import health_probe
from tests.support.chart import (
    COMPONENT,
    ROLES,
    SECURE,
    Rendered,
    files_of,
    flags_of,
    rendered_with,
    values_of,
)

Render = Callable[[str], Rendered]


def test_probes_expect_the_name_that_the_certificate_has(rendered: Render) -> None:
    names = {"client": "c.x", "coordinator": "co.x", "verify": "v.x", "draft": "d.x"}
    for found, wanted in (
        (rendered("cert-manager"), ROLES),
        (
            rendered_with("cert-manager", tls={"mode": "cert-manager", "names": names}),
            {"coordinator": "co.x", "verify-worker": "v.x", "draft-worker": "d.x"},
        ),
    ):
        certificates = {
            item["spec"]["secretName"]: item["spec"]["dnsNames"]
            for item in found.of("Certificate")
            if not item["spec"].get("isCA")
        }
        for pod, container, service in found.services():
            probe = health_probe.parse(container["livenessProbe"]["exec"]["command"])
            assert probe.tls_server_name == wanted[service]
            secret, _ = files_of(pod, container)[probe.tls_client_cert]
            assert wanted[service] in certificates[secret]


def test_certificates_say_what_is_checked(rendered: Render) -> None:
    found = rendered("cert-manager")
    certificates = {
        (item["metadata"]["labels"][COMPONENT], item["spec"]["secretName"]): item["spec"]
        for item in found.of("Certificate")
    }
    assert sorted(component for component, _ in certificates) == [
        *("authority", "client", "client", "coordinator", "coordinator"),
        *("draft-worker", "redis", "verify-worker", "verify-worker"),
    ]
    for (component, _), spec in certificates.items():
        if component == "authority":
            continue
        # No part has the role of another one.
        roles = {role for role, name in ROLES.items() if name in spec["dnsNames"]}
        assert roles == ({component} if component != "redis" else set())
        assert spec["privateKey"]["rotationPolicy"] == "Always"
        usages = {"client": {"client auth"}, "redis": {"server auth"}}
        both = {"server auth", "client auth"}
        assert set(spec["usages"]) == usages.get(component, both) | {"digital signature"}
        hours = [int(spec[key].removesuffix("h")) for key in ("duration", "renewBefore")]
        assert 0 < hours[1] < hours[0] <= 7 * 24
    issuers = {item["metadata"]["name"]: item["spec"] for item in found.of("Issuer")}
    for spec in certificates.values():
        assert spec["issuerRef"]["kind"] == "Issuer"
        signer = issuers[spec["issuerRef"]["name"]]
        assert ("selfSigned" in signer) is spec.get("isCA", False)
    (authority,) = [spec for spec in certificates.values() if spec.get("isCA")]
    assert {"secretName": authority["secretName"]} in [spec.get("ca") for spec in issuers.values()]


def test_certificates_have_the_names_that_clients_use(rendered: Render) -> None:
    found = rendered("cert-manager")
    specs = {item["spec"]["secretName"]: item["spec"] for item in found.of("Certificate")}
    names = set(specs["rel-outrider-main-coordinator-tls"]["dnsNames"])
    services = {
        item["metadata"]["name"]
        for item in found.of("Service")
        if item["spec"]["selector"]
        == {
            **item["spec"]["selector"],
            COMPONENT: "coordinator",
            "outrider/model": "main",
        }
        and item["spec"]["ports"][0]["name"] == "grpc"
    }
    assert len(services) == 2
    for service in services:
        assert {service, f"{service}.inference", f"{service}.inference.svc"} <= names
    assert {"chat.internal", "chat.example.com"} <= names
    assert "chat.example.com" not in specs["rel-outrider-small-coordinator-tls"]["dnsNames"]
    assert "rel-outrider-redis" in specs["rel-outrider-redis-tls"]["dnsNames"]
    (route,) = found.of("TLSRoute")
    assert route["spec"]["hostnames"] == ["chat.example.com"]


def test_an_issuer_of_ones_own_is_asked() -> None:
    issuer = {"name": "company", "kind": "ClusterIssuer"}
    found = rendered_with(
        "minimal", tls={"mode": "cert-manager", "certManager": {"issuerRef": issuer}}
    )
    assert found.of("Issuer") == []
    assert len(found.of("Certificate")) == 4
    for item in found.of("Certificate"):
        assert item["spec"]["issuerRef"] == issuer | {"group": "cert-manager.io"}


def test_authorities_come_from_where_it_is_said(rendered: Render) -> None:
    for name, wanted in (
        ("tls", ("outrider-authorities", "bundle.pem")),
        ("cert-manager", ("rel-outrider-main-verify-tls", "ca.crt")),
        ("auth", ("verify-tls", "ca.crt")),
    ):
        pod, container, _ = next(
            one for one in rendered(name).services() if one[2] == "verify-worker"
        )
        assert files_of(pod, container)["/etc/outrider/tls/ca.crt"] == wanted


@pytest.mark.parametrize("name", SECURE)
def test_services_are_called_by_their_callers_only(rendered: Render, name: str) -> None:
    found = {service: flags_of(container) for _, container, service in rendered(name).services()}
    caller = {
        "coordinator": "client",
        "verify-worker": "coordinator",
        "draft-worker": "verify-worker",
    }
    for service, flags in found.items():
        if service == "coordinator" and name == "auth":
            assert flags["--tls-client-auth"] == "none"
            assert "--allow-peer" not in flags
            continue
        assert flags["--allow-peer"] == ROLES[caller[service]]
        assert "--tls-client-auth" not in flags
    assert found["coordinator"]["--verify-worker-name"] == ROLES["verify-worker"]
    assert found["verify-worker"]["--draft-worker-name"] == ROLES["draft-worker"]


def test_a_pattern_of_names_of_ones_own_is_possible() -> None:
    spiffe = "spiffe://example.org/ns/inference/sa/*"
    verify = values_of("auth")["verify"] | {"flags": {"allow-peer": [spiffe]}}
    for _, container, service in rendered_with("auth", verify=verify).services():
        allowed = [a.partition("=")[2] for a in container["args"] if a.startswith("--allow-peer=")]
        if service == "verify-worker":
            assert fnmatchcase("spiffe://example.org/ns/inference/sa/coordinator", allowed[1])
            assert allowed[0] == ROLES["coordinator"]
