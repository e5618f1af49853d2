"""Who may reach whom, what is secret, who owns the number of replicas, what never changes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.chart import (
    FILES,
    NAMESPACE,
    Manifest,
    Rendered,
    load_chart,
    rendered_with,
    values_of,
)

Render = Callable[[str], Rendered]
COMPONENT, MODEL = "app.kubernetes.io/component", "outrider/model"
STABLE = {"app.kubernetes.io/name", "app.kubernetes.io/instance", COMPONENT, MODEL}
SERVICES = ("coordinator", "verify-worker", "draft-worker")
# (from, to): the port that it goes to. What is outside a release is in capitals.
ARROWS = {
    ("CLIENTS", "coordinator"): 7070,
    ("coordinator", "verify-worker"): 7071,
    ("verify-worker", "draft-worker"): 7072,
    ("coordinator", "redis"): 6379,
    ("verify-worker", "redis"): 6379,
    ("draft-worker", "redis"): 6379,
}


def walk(item: Any) -> Iterator[tuple[str, Any]]:
    """Every key of a manifest with its value."""
    if isinstance(item, dict):
        for key, value in item.items():
            yield key, value
            yield from walk(value)
    elif isinstance(item, list):
        for value in item:
            yield from walk(value)


def chosen(found: Rendered, selector: Manifest) -> set[str]:
    """The components of the pods that a label selector chooses; never one of another model."""
    components = set()
    for _, pod in found.pods():
        labels = pod["metadata"]["labels"]
        if all(labels.get(k) == v for k, v in selector.get("matchLabels", {}).items()) and all(
            labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions", [])
        ):
            components.add(labels[COMPONENT])
    return components


def policies(found: Rendered) -> Iterator[tuple[str, Manifest]]:
    for policy in found.of("NetworkPolicy"):
        (component,) = chosen(found, policy["spec"]["podSelector"])
        yield component, policy["spec"]


def arrows(found: Rendered, side: str, peers: str) -> set[tuple[str, str, int]]:
    """What the rules of one side allow, as (from, to, port); without DNS and metrics."""
    seen = set()
    for component, spec in policies(found):
        for rule in spec[side]:
            ports = [port["port"] for port in rule.get("ports", [])]
            if ports in ([53, 53], [9464], [4317]):
                continue
            names: set[str] = {"CLIENTS"} if peers not in rule else set()
            for peer in rule.get(peers, []):
                assert set(peer) == {"podSelector"}, "outside the namespace"
                names |= chosen(found, peer["podSelector"])
            for name in names:
                pair = (name, component) if side == "ingress" else (component, name)
                seen |= {(*pair, port) for port in ports}
    return seen


@pytest.mark.parametrize("name", ["minimal", "hpa", "two-models"])
def test_policies_allow_the_arrows_of_the_design_and_nothing_else(
    rendered: Render, name: str
) -> None:
    found = rendered(name)
    wanted = {(*pair, port) for pair, port in ARROWS.items()}
    assert arrows(found, "ingress", "from") == wanted
    assert arrows(found, "egress", "to") == {arrow for arrow in wanted if arrow[0] != "CLIENTS"}


@pytest.mark.parametrize("name", FILES)
def test_every_pod_is_under_a_policy(rendered: Render, name: str) -> None:
    found = rendered(name)
    kinds = [component for component, _ in policies(found)]
    if name == "everything-off":
        assert kinds == []
        return
    covered = {component for component, _ in policies(found)}
    assert covered == {pod["metadata"]["labels"][COMPONENT] for _, pod in found.pods()}
    for _, spec in policies(found):
        assert spec["policyTypes"] == ["Ingress", "Egress"]


def test_models_do_not_reach_each_other(rendered: Render) -> None:
    found = rendered("two-models")
    for policy in found.of("NetworkPolicy"):
        own = policy["spec"]["podSelector"]["matchLabels"].get(MODEL)
        peers = [v["matchLabels"].get(MODEL) for k, v in walk(policy["spec"]) if k == "podSelector"]
        if own:
            assert set(peers) <= {own, None}
            # None is Redis alone.
            assert peers.count(None) == 1


def test_external_redis_is_reached_where_it_is_said_to_be(rendered: Render) -> None:
    for _, spec in policies(rendered("tls")):
        rules = [rule for rule in spec["egress"] if rule["ports"][0]["port"] == 6380]
        assert [rule["to"] for rule in rules] == [[{"ipBlock": {"cidr": "10.20.0.0/16"}}]]


@pytest.mark.parametrize("name", FILES)
def test_no_secret_is_in_an_environment_or_a_command_line(rendered: Render, name: str) -> None:
    for _, pod in rendered(name).pods():
        containers = [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]
        for container in containers:
            assert "envFrom" not in container
            assert not [key for key, _ in walk(container) if key == "secretKeyRef"]
        urls = [a for c in containers for a in c.get("args", []) if "--redis-url" in a]
        assert not [url for url in urls if ":" in url.partition("://")[2].rpartition("@")[0]]


@pytest.mark.parametrize("name", ["tls", "external-redis", "everything-on"])
def test_the_password_of_redis_is_a_mounted_file(rendered: Render, name: str) -> None:
    for pod, container, _ in rendered(name).services():
        assert "--redis-password-file=/etc/outrider/redis/password" in container["args"]
        mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
        assert mounts["redis-password"]["mountPath"] == "/etc/outrider/redis"
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert volumes["redis-password"]["secret"]["items"][0]["path"] == "password"


@pytest.mark.parametrize("name", FILES)
def test_no_replicas_under_a_scaler(rendered: Render, name: str) -> None:
    found = rendered(name)
    scaled = {
        (item["spec"]["scaleTargetRef"]["kind"], item["spec"]["scaleTargetRef"]["name"])
        for item in found.of("HorizontalPodAutoscaler", "ScaledObject")
    }
    assert len(scaled) == {"hpa": 3, "keda": 2}.get(name, 0)
    there = {
        (item["kind"], item["metadata"]["name"])
        for item in found.of(*("Deployment", "StatefulSet"))
    }
    assert scaled <= there
    for item in found.of("Deployment", "StatefulSet"):
        owned = (item["kind"], item["metadata"]["name"]) in scaled
        assert ("replicas" in item["spec"]) is not owned


@pytest.mark.parametrize("name", FILES)
def test_selectors_choose_their_pods_and_hold_only_what_never_changes(
    rendered: Render, name: str
) -> None:
    for item in rendered(name).of("Deployment", "StatefulSet"):
        selector = item["spec"]["selector"]["matchLabels"]
        assert set(selector) <= STABLE
        labels = item["spec"]["template"]["metadata"]["labels"]
        assert {key: labels[key] for key in selector} == selector


def test_selectors_survive_an_upgrade() -> None:
    later = {
        "commonLabels": {"team": "other"},
        "image": {"tag": "9"},
        "draft": {"podLabels": {COMPONENT: "stolen"}, "autoscaling": {"scaler": "hpa"}},
    }
    with load_chart() as chart:
        old, new = (Rendered(chart, values_of("minimal") | more) for more in ({}, later))
    for kind in ("Deployment", "StatefulSet"):
        selectors = [
            {i["metadata"]["name"]: i["spec"]["selector"] for i in found.of(kind)}
            for found in (old, new)
        ]
        assert selectors[0] == selectors[1]


@pytest.mark.parametrize("name", FILES)
def test_services_and_budgets_choose_what_they_are_for(rendered: Render, name: str) -> None:
    found = rendered(name)
    for item in found.of("Service"):
        (component,) = chosen(found, {"matchLabels": item["spec"]["selector"]})
        assert item["metadata"]["labels"][COMPONENT] == component
    for item in found.of("PodDisruptionBudget"):
        assert len(chosen(found, item["spec"]["selector"])) == 1
    heads = [item for item in found.of("Service") if item["spec"].get("clusterIP") == "None"]
    assert {item["metadata"]["labels"][COMPONENT] for item in heads} >= {"coordinator"}


@pytest.mark.parametrize("name", FILES)
def test_pods_have_no_rights(rendered: Render, name: str) -> None:
    accounts = {}
    for _, pod in rendered(name).pods():
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
        labels = pod["metadata"]["labels"]
        if labels[COMPONENT] in SERVICES and name != "everything-off":
            key = (labels.get(MODEL), labels[COMPONENT])
            accounts[key] = spec["serviceAccountName"]
    # The draft pool has an identity of its own.
    assert len(set(accounts.values())) == len(accounts)


def test_keda_asks_for_the_signal_of_its_own_pool(rendered: Render) -> None:
    scaler = rendered("keda").named("ScaledObject", "rel-outrider-main-draft")
    assert scaler["spec"]["minReplicaCount"] == 0
    trigger = scaler["spec"]["triggers"][0]["metadata"]
    assert trigger["query"] == (
        "sum(rate(outrider_draft_demand_seconds_total{"
        f'namespace="{NAMESPACE}",outrider_release="rel",outrider_model="main"'
        "}[1m]))"
    )
    assert (trigger["threshold"], trigger["activationThreshold"]) == ("0.7", "0")
    # No answer of Prometheus is not the same as no demand.
    assert trigger["ignoreNullValues"] == "false"


def test_without_prometheus_no_pool_gets_smaller(rendered: Render) -> None:
    drafts = rendered("keda").named("ScaledObject", "rel-outrider-main-draft")["spec"]
    wanted = {"failureThreshold": 3, "replicas": 1, "behavior": "currentReplicasIfHigher"}
    assert drafts["fallback"] == wanted
    keda = {"autoscaling": {"scaler": "keda"}}
    for item in rendered_with("minimal", coordinator=keda, verify=keda).of("ScaledObject"):
        assert "fallback" not in item["spec"]


def test_the_hpa_asks_for_the_same(rendered: Render) -> None:
    scaler = rendered("hpa").named("HorizontalPodAutoscaler", "rel-outrider-main-draft")
    external = scaler["spec"]["metrics"][0]["external"]
    assert external["metric"]["name"] == "outrider_draft_demand"
    assert external["target"] == {"type": "AverageValue", "averageValue": "700m"}
    rules = rendered("hpa").named("ConfigMap", "rel-outrider-adapter-rules")["data"]["rules.yaml"]
    assert "{as: outrider_draft_demand}" in rules
    # Prometheus has the labels by which the HPA chooses.
    relabelings = rendered("hpa").of("PodMonitor")[0]["spec"]["podMetricsEndpoints"][0]
    targets = {one.get("targetLabel") for one in relabelings["relabelings"]}
    assert set(external["metric"]["selector"]["matchLabels"]) <= targets


@pytest.mark.parametrize(
    ("host", "redis_port", "otlp_port"),
    [
        ("host", 6379, 4317),
        ("host:1234", 1234, 1234),
        ("[fd00::1]", 6379, 4317),
        ("[fd00::1]:1234", 1234, 1234),
    ],
)
def test_ports_are_those_of_the_addresses(host: str, redis_port: int, otlp_port: int) -> None:
    addresses = {"redis": {"url": f"redis://{host}/0"}, "telemetry": {"otlpEndpoint": ""}}
    addresses["telemetry"]["otlpEndpoint"] = f"http://{host}"
    with load_chart() as chart:
        found = Rendered(chart, values_of("minimal") | addresses)
    for _, spec in policies(found):
        ports = [rule["ports"][0]["port"] for rule in spec["egress"]]
        # DNS comes first, what a service calls on its own behalf last or before.
        assert ports[1] == redis_port
        assert ports[-1] == otlp_port


def test_all_addresses_of_redis_can_be_reached() -> None:
    redis = {"url": "redis://a:6379,redis://b:6380/0,redis://[fd00::1],rediss://c:6380/0"}
    for _, spec in policies(rendered_with("minimal", redis=redis)):
        ports = [port["port"] for rule in spec["egress"] for port in rule["ports"]]
        # DNS is before, what a service calls behind.
        assert ports[2:4] == [6379, 6380]
        assert ports.count(6379) == ports.count(6380) == 1


def test_dns_is_asked_where_its_pods_listen() -> None:
    network = {"dnsPorts": [53, 5353]}
    for component, spec in policies(rendered_with("minimal", networkPolicy=network)):
        if component == "redis":
            continue
        ports = [(port["port"], port["protocol"]) for port in spec["egress"][0]["ports"]]
        assert sorted(ports) == [(53, "TCP"), (53, "UDP"), (5353, "TCP"), (5353, "UDP")]


def test_coordinators_are_spread_where_there_is_room(rendered: Render) -> None:
    for name in ("minimal", "two-models", "everything-on"):
        for item, pod in rendered(name).pods():
            spread = pod["spec"].get("topologySpreadConstraints", [])
            assert bool(spread) is (pod["metadata"]["labels"][COMPONENT] == "coordinator")
            for one in spread:
                assert one["whenUnsatisfiable"] == "ScheduleAnyway"
                if name != "everything-on":
                    assert one["labelSelector"] == item["spec"]["selector"]
            assert len(spread) in ({0, 1} if name == "everything-on" else {0, 2})


def test_a_large_volume_is_not_walked_at_each_start(rendered: Render) -> None:
    for _, pod in rendered("everything-on").pods():
        assert pod["spec"]["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


def test_a_service_monitor_sees_every_part_once(rendered: Render) -> None:
    found = rendered("cert-manager")
    (monitor,) = found.of("ServiceMonitor")
    wanted = monitor["spec"]["selector"]["matchLabels"]
    services = [
        item for item in found.of("Service") if wanted.items() <= item["metadata"]["labels"].items()
    ]
    seen: list[str] = []
    for service in services:
        # Also of what loads or drains: the signal for scaling is there all the time.
        assert service["spec"]["publishNotReadyAddresses"] is True
        (endpoint,) = monitor["spec"]["endpoints"]
        assert [port["name"] for port in service["spec"]["ports"]] == [endpoint["port"]]
        for item, pod in found.pods():
            if service["spec"]["selector"].items() <= pod["metadata"]["labels"].items():
                seen.append(item["metadata"]["name"])
    assert sorted(seen) == sorted(
        item["metadata"]["name"]
        for item, pod in found.pods()
        if pod["metadata"]["labels"][COMPONENT] in SERVICES
    )
    # The same labels as a PodMonitor gives, by which scalers and dashboards choose.
    (of_pods,) = rendered("hpa").of("PodMonitor")
    assert (
        monitor["spec"]["endpoints"][0]["relabelings"]
        == of_pods["spec"]["podMetricsEndpoints"][0]["relabelings"]
    )
