"""Verify workers on several hosts: what KubeRay makes of the pods that the chart gives it."""

import shlex
from collections.abc import Callable

import pytest

from tests.support.chart import COMPONENT, Manifest, Rendered, rendered_with

Render = Callable[[str], Rendered]
# What Prometheus sees of the container that a port belongs to.
CONTAINER = "__meta_kubernetes_pod_container_name"


def rank_of(cluster: Manifest) -> Manifest:
    found: Manifest = cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
    return found


def test_no_budget_blocks_the_drains_of_nodes(rendered: Render) -> None:
    # For pods whose owner has no scale, the disruption controller allows no eviction at all.
    budgets = {i["metadata"]["name"] for i in rendered("kuberay").of("PodDisruptionBudget")}
    assert budgets == {"rel-outrider-main-coordinator", "rel-outrider-main-draft"}
    alone = {i["metadata"]["name"] for i in rendered("minimal").of("PodDisruptionBudget")}
    assert alone == budgets | {"rel-outrider-main-verify"}


def test_every_container_has_probes_of_its_own(rendered: Render) -> None:
    clusters = rendered("kuberay").of("RayCluster")
    assert len(clusters) == 2
    for _, pod in rendered("kuberay").pods():
        for container in pod["spec"]["containers"]:
            assert {"livenessProbe", "readinessProbe"} <= container.keys()


def test_ranks_are_probed_where_they_listen(rendered: Render) -> None:
    for cluster in rendered("kuberay").of("RayCluster"):
        rank = rank_of(cluster)
        ports = {port["name"]: port["containerPort"] for port in rank["ports"]}
        (command,) = rank["args"]
        assert f"--node-manager-port={ports['ray-node']} " in command
        # The container ends with Ray.
        assert command.startswith("exec ")
        assert "--block" in command
        for kind in ("startup", "liveness", "readiness"):
            assert rank[f"{kind}Probe"]["tcpSocket"] == {"port": "ray-node"}
        liveness = rank["livenessProbe"]
        assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 60


def test_ranks_are_spread_over_the_hosts_and_yield_to_nobody(rendered: Render) -> None:
    for cluster in rendered("kuberay").of("RayCluster"):
        (head,) = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
        assert head["args"].count("--ray-strategy=spread") == 1
        script = head["args"][0]
        assert script.startswith("ray start --head ")
        assert '--system-config={"worker_niceness":0}' in shlex.split(script)
    chosen = rendered_with("kuberay", verify={"flags": {"ray-strategy": "pack"}})
    for cluster in chosen.of("RayCluster"):
        (head,) = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
        assert [arg for arg in head["args"] if "ray-strategy" in arg] == ["--ray-strategy=pack"]


def test_an_upgrade_makes_the_pods_anew(rendered: Render) -> None:
    for cluster in rendered("kuberay").of("RayCluster"):
        assert cluster["spec"]["upgradeStrategy"] == {"type": "Recreate"}


@pytest.mark.parametrize("name", ["podMonitor", "serviceMonitor"])
def test_the_metrics_of_ray_are_not_taken_for_ours(name: str) -> None:
    found = rendered_with("kuberay", monitoring={name: {"enabled": True}})
    (monitor,) = found.of("PodMonitor", "ServiceMonitor")
    spec = monitor["spec"]
    (endpoint,) = spec.get("podMetricsEndpoints") or spec["endpoints"]
    (drop,) = [one for one in endpoint["relabelings"] if one.get("action") == "drop"]
    assert drop["sourceLabels"] == [CONTAINER]
    dropped = {rank_of(cluster)["name"] for cluster in found.of("RayCluster")}
    assert dropped == {drop["regex"]}
    # Nothing else is called so.
    services = {pod["metadata"]["labels"][COMPONENT] for pod, _, _ in found.services()}
    assert services == {"coordinator", "verify-worker", "draft-worker"}
    assert drop["regex"] not in {container["name"] for _, container, _ in found.services()}
