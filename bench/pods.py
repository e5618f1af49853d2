"""The pods that a release of the chart would have: their commands, their probes, their ends.

What is read here is what the kubelet would read: the rendered objects. Helm and YAML are needed,
so the development tools.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helm_python
import yaml

CHART = Path(__file__).resolve().parent.parent / "k8s" / "outrider"
SERVICES = ("coordinator", "verify-worker", "draft-worker")
STARTUP, LIVENESS, READINESS = "startup", "liveness", "readiness"
COMPONENT, MODEL = "app.kubernetes.io/component", "outrider/model"
RELEASE, NAMESPACE = "rel", "inference"
Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Probe:
    """A probe as the kubelet sees it; the values are Kubernetes' own where the chart has none.

    port, service: of a gRPC health check. command: of one that is executed, empty for gRPC.
    grace_s: what the container gets to end when the probe has failed; None is the pod's own.
    """

    port: int
    service: str
    command: tuple[str, ...]
    period_s: float
    timeout_s: float
    failures: int
    successes: int
    delay_s: float
    grace_s: float | None

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> "Probe":
        """Read a probe of a container.

        Raises:
            ValueError: it is neither a gRPC probe nor one that executes a command.
        """
        if not {"grpc", "exec"} & set(manifest):
            raise ValueError(f"a probe of another kind: {sorted(manifest)}")
        grpc = manifest.get("grpc", {})
        return cls(
            port=grpc.get("port", 0),
            service=grpc.get("service", ""),
            command=tuple(manifest.get("exec", {}).get("command", ())),
            period_s=manifest.get("periodSeconds", 10),
            timeout_s=manifest.get("timeoutSeconds", 1),
            failures=manifest.get("failureThreshold", 3),
            successes=manifest.get("successThreshold", 1),
            delay_s=manifest.get("initialDelaySeconds", 0),
            grace_s=manifest.get("terminationGracePeriodSeconds"),
        )

    @property
    def silence_s(self) -> float:
        """The longest that nobody answers before the kubelet has had enough."""
        return self.period_s * self.failures + self.timeout_s


@dataclass(frozen=True, slots=True)
class Pod:
    """One workload's pod: its only container that runs a service.

    args: its command line after `outrider SERVICE`, with $(POD_NAME) and $(POD_IP) in it.
    grace_s: what it gets from its deletion to its end, pre_stop_s of it before SIGTERM.
    """

    name: str
    service: str
    labels: Mapping[str, str]
    replicas: int
    args: tuple[str, ...]
    probes: Mapping[str, Probe]
    grace_s: float
    pre_stop_s: float

    def arguments(self, name: str, address: str) -> list[str]:
        """The command line of the pod of that name and address."""
        known = {"$(POD_NAME)": name, "$(POD_IP)": address}
        found = []
        for argument in self.args:
            for variable, value in known.items():
                argument = argument.replace(variable, value)
            found.append(argument)
        return found


def render(values: Manifest) -> list[Manifest]:
    """The objects of a release with these values."""
    with helm_python.Chart.load(CHART) as chart:
        texts = chart.render(values, name=RELEASE, namespace=NAMESPACE)
    return [
        item
        for path, text in sorted(texts.items())
        if path.endswith(".yaml")
        for item in yaml.safe_load_all(text)
        if item
    ]


def pods(objects: Sequence[Manifest]) -> Iterator[Pod]:
    """The pods of the services in Deployments and StatefulSets, one for each workload."""
    for item in objects:
        if item["kind"] not in ("Deployment", "StatefulSet"):
            continue
        template = item["spec"]["template"]
        for container in template["spec"]["containers"]:
            service = container["name"]
            if service not in SERVICES:
                continue
            args = container["args"]
            stop = container.get("lifecycle", {}).get("preStop", {})
            yield Pod(
                name=item["metadata"]["name"],
                service=service,
                labels=template["metadata"]["labels"],
                replicas=item["spec"].get("replicas", 1),
                args=tuple(args[args.index(service) + 1 :]),
                probes={
                    kind: Probe.of(container[f"{kind}Probe"])
                    for kind in (STARTUP, LIVENESS, READINESS)
                },
                grace_s=template["spec"]["terminationGracePeriodSeconds"],
                pre_stop_s=stop.get("sleep", {}).get("seconds", 0),
            )
