"""The chart renders what Kubernetes takes, and refuses wrong values by name."""

import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import helm_python
import kubernetes_validate
import kubernetes_validate.utils
import pytest

from tests.support.chart import CHART, FILES, Rendered, load_chart, values_of

Render = Callable[[str], Rendered]
OLDEST, NEWEST = "1.30", kubernetes_validate.latest_version()
# Kinds of controllers that bring their own schemas.
FOREIGN = {
    *("PodMonitor", "ServiceMonitor", "ScaledObject", "RayCluster"),
    *("GRPCRoute", "HTTPRoute", "TLSRoute", "Certificate", "Issuer"),
}


def nested(path: str, value: Any) -> dict[str, Any]:
    first, _, rest = path.partition(".")
    return {first: nested(rest, value) if rest else value}


def over(values: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for key, value in more.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = over(merged[key], value) if both else value
    return merged


def test_there_are_value_files_for_every_way_to_run_it() -> None:
    assert {
        "minimal",
        "tls",
        "external-redis",
        "hpa",
        "keda",
        "kuberay",
        "two-models",
        "everything-off",
        "cert-manager",
        "auth",
    } <= set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_lint_finds_nothing(name: str) -> None:
    report = helm_python.lint(CHART, values_of(name), strict=True, kube_version="v1.30.0")
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > 1] == []


@pytest.fixture(autouse=True, scope="module")
def schemas_read_once() -> Iterator[None]:
    """One of their files is large, and read for every object otherwise."""
    cached = functools.cache(kubernetes_validate.utils.schema_contents)
    with mock.patch.object(kubernetes_validate.utils, "schema_contents", cached):
        yield


@pytest.mark.parametrize(
    ("name", "version"),
    [*((name, OLDEST) for name in FILES), *((name, NEWEST) for name in ("everything-on", "auth"))],
)
def test_every_object_is_valid(rendered: Render, name: str, version: str) -> None:
    assert rendered(name).objects
    for item in rendered(name).objects:
        if item["kind"] in FOREIGN:
            continue
        kubernetes_validate.validate(item, version, strict=True)


def test_validation_finds_a_field_that_does_not_exist(rendered: Render) -> None:
    pod = rendered("minimal").of("StatefulSet")[0]
    wrong = over(pod, {"spec": {"template": {"spec": {"enableServiceLink": False}}}})
    with pytest.raises(kubernetes_validate.ValidationError, match="enableServiceLink"):
        kubernetes_validate.validate(wrong, OLDEST, strict=True)


@pytest.mark.parametrize("name", FILES)
def test_names_are_unique_and_short_enough(rendered: Render, name: str) -> None:
    names = [(item["kind"], item["metadata"]["name"]) for item in rendered(name).objects]
    assert len(names) == len(set(names))
    for kind, found in names:
        # A StatefulSet's pods have its name and a hash as a label.
        assert len(found) <= (52 if kind == "StatefulSet" else 63)


def test_long_names_are_cut_and_stay_apart() -> None:
    pair = {"target": "/m"}
    values = over(values_of("cert-manager"), {"models": {"a" * 16: pair}})
    with load_chart() as chart:
        found = Rendered(chart, values, release="r" * 53)
    names = [(item["kind"], item["metadata"]["name"]) for item in found.objects]
    assert len(set(names)) == len(names)
    assert max(len(name) for _, name in names) <= 63
    assert max(len(name) for kind, name in names if kind == "StatefulSet") <= 52


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("models.main.target", "", "target"),
        ("models.main.drafter", "medusa", "drafter"),
        ("models.main.drafter", "model", "draftModel"),
        ("models.main.draftModel", "/models/draft", "draftModel"),
        ("models.Main", {"target": "/m"}, "Main"),
        ("models.main.verfy", {}, "verfy"),
        ("replicas", 3, "replicas"),
        ("draft.replicas", -1, "replicas"),
        ("draft.autoscaling.target", 1.5, "target"),
        ("draft.autoscaling.scaler", "HPA", "scaler"),
        ("coordinator.flags", {"queue-wait": 3}, "queue-wait"),
        ("verify.flags", {"dtype": "int8"}, "dtype"),
        ("verify.flags", {"max-sessions": 0}, "max-sessions"),
        ("verify.flags", {"port": 1}, "port"),
        ("draft.flags", {"group": "mine"}, "group"),
        ("models.main.verify", {"flags": {"kv_memory": "1GiB"}}, "kv_memory"),
        ("draft.flags", {"prefill-chunk": "many"}, "prefill-chunk"),
        ("redis.url", "redis://user:secret@host:6379", "url"),
        ("redis.url", "memcached://host", "url"),
        ("redis.url", "redis://host:6379/0?password=secret", "url"),
        ("redis.url", "redis://host?db=1&username=me&x=1", "url"),
        ("redis.url", "redis://a,redis://host?p%61ssword=secret", "url"),
        ("telemetry.otlpEndpoint", "http://user:secret@host:4317", "otlpEndpoint"),
        ("scaling.prometheusUrl", "http://user:secret@host", "prometheusUrl"),
        ("nameOverride", "Chat", "nameOverride"),
        ("fullnameOverride", "2024", "fullnameOverride"),
        ("fullnameOverride", "chat.v2", "fullnameOverride"),
        ("networkPolicy.dnsPorts", [0], "dnsPorts"),
        ("redis.trial.nodeSelector", ["small"], "nodeSelector"),
        ("telemetry.metricsPort", 70000, "metricsPort"),
        ("telemetry.logLevel", "loud", "logLevel"),
        ("drainSeconds", "30s", "drainSeconds"),
        (
            "verify.extraEnv",
            [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}],
            "secretKeyRef",
        ),
        ("route", {"enabled": True}, "parentRefs"),
        ("tls.mode", "mtls", "mode"),
        ("tls.clientCertificates", "optional", "clientCertificates"),
        ("tls.secret", "x", "secret"),
        ("tls.certManager.duration", "7d", "duration"),
        ("tls.certManager.clients", ["Web"], "clients"),
        ("tls.names.verify", "*.outrider", "verify"),
        ("verify.tlsSecret", "A B", "tlsSecret"),
        ("auth.tokensSecret", "tokens", "tokensSecret"),
        ("coordinator.flags", {"tokens": ["/tmp/tokens"]}, "tokens"),
        ("draft.flags", {"tls-key": "/tmp/key"}, "tls-key"),
        ("redis.users.verify.password", "secret", "password"),
        ("redis.clientCertificate.from", "own", "from"),
    ],
)
def test_wrong_values_are_refused_with_their_name(path: str, value: Any, field: str) -> None:
    with load_chart() as chart, pytest.raises(helm_python.HelmValuesError, match=field):
        chart.validate_schema(over(values_of("minimal"), nested(path, value)))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"scaler": "hpa", "minReplicas": 0}, "draft.autoscaling.minReplicas"),
        ({"scaler": "none"}, ""),
    ],
)
def test_zero_replicas_need_keda(more: dict[str, Any], said: str) -> None:
    values = over(values_of("minimal"), {"draft": {"autoscaling": more}})
    with load_chart() as chart:
        if not said:
            chart.render(values, name="r", namespace="n")
            return
        with pytest.raises(helm_python.HelmRenderError, match=said):
            chart.render(values, name="r", namespace="n")


SECRETS = {"tls": {"mode": "secrets"}, "redis": {"trial": {"tlsSecret": "r"}}}
NO_METRICS = {"telemetry": {"metricsPort": 0}}
PARTS = {part: {"tlsSecret": part} for part in ("coordinator", "verify", "draft")}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (SECRETS, "verify.tlsSecret must be given with tls.mode secrets"),
        (SECRETS | PARTS | {"redis": {}}, "redis.trial.tlsSecret"),
        (PARTS, "tlsSecret is of no use with tls.mode none"),
        (PARTS | {"tls": {"mode": "cert-manager"}}, "tlsSecret is of no use"),
        ({"tls": {"clientCertificates": "none"}}, "tls.clientCertificates none needs"),
        (
            SECRETS
            | PARTS
            | {"tls": {"mode": "secrets", "authorities": {"secret": "a", "configMap": "b"}}},
            "tls.authorities",
        ),
        (
            {"tls": {"mode": "cert-manager", "certManager": {"renewBefore": "168h"}}},
            "tls.certManager.renewBefore",
        ),
        (
            {"redis": {"users": {"secret": "u"}, "passwordSecret": {"name": "p"}}},
            "redis.users.secret and redis.passwordSecret.name",
        ),
        (
            {"redis": {"users": {"secret": "u"}, "url": "redis://me@r"}},
            "redis.url must name no user",
        ),
        (
            {"redis": {"url": "redis://r", "clientCertificate": {"from": "secret", "secret": "c"}}},
            "redis.url of rediss://",
        ),
        (
            {"redis": {"url": "rediss://r", "clientCertificate": {"from": "part"}}},
            "redis.clientCertificate.from part needs tls.mode",
        ),
        (
            {"redis": {"url": "rediss://r", "clientCertificate": {"from": "secret"}}},
            "redis.clientCertificate.secret must be given",
        ),
        ({"redis": {"clientCertificate": {"secret": "c"}}}, "redis.clientCertificate.secret needs"),
        ({"redis": {"caSecret": {"name": "c"}}}, "redis.caSecret"),
        (
            {"route": {"enabled": True, "kind": "TLSRoute", "parentRefs": [{"name": "g"}]}},
            "route.kind TLSRoute needs tls.mode",
        ),
        (
            {"monitoring": {"podMonitor": {"enabled": True}, "serviceMonitor": {"enabled": True}}},
            "twice",
        ),
        (
            {"monitoring": {"serviceMonitor": {"enabled": True}}, "telemetry": {"metricsPort": 0}},
            "telemetry.metricsPort",
        ),
        (
            {"draft": {"strategy": {"rollingUpdate": {"maxSurge": 0}}}},
            "draft.strategy.rollingUpdate: maxSurge and maxUnavailable",
        ),
        (
            {
                "models": {
                    "main": {
                        "coordinator": {
                            "strategy": {"rollingUpdate": {"maxSurge": "0%", "maxUnavailable": 0}}
                        }
                    }
                }
            },
            "coordinator.strategy.rollingUpdate: maxSurge and maxUnavailable",
        ),
        *(
            ({part: {"autoscaling": {"scaler": scaler} | more}} | beside, f"{part}.{said}")
            for scaler, part, more, beside, said in (
                ("hpa", "draft", {"minReplicas": 9}, {}, "autoscaling.minReplicas"),
                ("keda", "verify", {"minReplicas": 5}, {}, "autoscaling.minReplicas"),
                ("hpa", "draft", {"target": 0.0004}, {}, "autoscaling.target"),
                ("keda", "draft", {}, NO_METRICS, "autoscaling.scaler needs"),
            )
        ),
        ({"ingress": {"enabled": True}}, "ingress.enabled needs a model with a host"),
        (
            {"route": {"enabled": True, "parentRefs": [{"name": "g"}]}},
            "route.enabled needs a model with a host",
        ),
        ({"models": {"main": {"fetch": {"image": "i"}}}}, "models.main: volume and fetch"),
        (
            {
                "models": {"client": {"target": "/m"}},
                "tls": {"mode": "cert-manager", "certManager": {"clients": ["verify"]}},
            },
            "models.client",
        ),
    ],
)
def test_values_that_do_not_fit_are_refused(more: dict[str, Any], said: str) -> None:
    with load_chart() as chart, pytest.raises(helm_python.HelmRenderError, match=said):
        chart.render(over(values_of("minimal"), more), name="r", namespace="n")


def test_what_is_made_anew_takes_no_rolling_update() -> None:
    with load_chart() as chart:
        found = Rendered(
            chart,
            over(values_of("minimal"), {"draft": {"strategy": {"type": "Recreate"}}}),
        )
    strategies = {i["metadata"]["name"]: i["spec"]["strategy"] for i in found.of("Deployment")}
    assert strategies["rel-outrider-main-draft"] == {"type": "Recreate"}
    assert strategies["rel-outrider-main-coordinator"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
    }
