"""The Helm chart, rendered with the values of a file; objects are what `kubectl` would see."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import yaml

from outrider import callers

CHART = Path(__file__).resolve().parents[2] / "k8s" / "outrider"
FILES = sorted(path.stem for path in (CHART / "ci").glob("*.yaml"))
RELEASE, NAMESPACE = "rel", "inference"
Manifest = dict[str, Any]
COMPONENT = "app.kubernetes.io/component"
# The names that certificates have, by part.
ROLES = {
    "client": callers.CLIENT_NAME,
    "coordinator": callers.COORDINATOR_NAME,
    "verify-worker": callers.VERIFY_WORKER_NAME,
    "draft-worker": callers.DRAFT_WORKER_NAME,
}
# Value files with TLS between all parts.
SECURE = ("tls", "cert-manager", "auth")
WORKLOADS = ("Deployment", "StatefulSet", "RayCluster")


def values_of(name: str) -> Manifest:
    """The values of ci/NAME.yaml."""
    loaded: Manifest = yaml.safe_load((CHART / "ci" / f"{name}.yaml").read_text())
    return loaded


class Rendered:
    """The objects that a release would have."""

    def __init__(self, chart: Any, values: Manifest, *, release: str = RELEASE) -> None:
        texts = chart.render(values, name=release, namespace=NAMESPACE)
        self.notes = next(text for path, text in texts.items() if path.endswith("NOTES.txt"))
        self.objects: list[Manifest] = [
            item
            for path, text in sorted(texts.items())
            if path.endswith(".yaml")
            for item in yaml.safe_load_all(text)
            if item
        ]

    def of(self, *kinds: str) -> list[Manifest]:
        """The objects of these kinds."""
        return [item for item in self.objects if item["kind"] in kinds]

    def named(self, kind: str, name: str) -> Manifest:
        """One object."""
        return next(item for item in self.of(kind) if item["metadata"]["name"] == name)

    def pods(self) -> Iterator[tuple[Manifest, Manifest]]:
        """Every pod template, with the object that it belongs to."""
        for item in self.of(*WORKLOADS):
            spec = item["spec"]
            if item["kind"] == "RayCluster":
                for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
                    yield item, group["template"]
            else:
                yield item, spec["template"]

    def services(self) -> Iterator[tuple[Manifest, Manifest, str]]:
        """Every container that runs a service: the pod, the container, the service's name."""
        for _, pod in self.pods():
            for container in pod["spec"]["containers"]:
                if container["name"] in ("coordinator", "verify-worker", "draft-worker"):
                    yield pod, container, container["name"]


def load_chart() -> Any:
    """The chart, to be closed after use."""
    return helm_python.Chart.load(CHART)


def arguments_of(container: Manifest) -> list[str]:
    """What the service is started with, after its name."""
    args: list[str] = container["args"]
    return args[args.index(container["name"]) + 1 :]


def rendered_with(name: str, **more: Any) -> Rendered:
    """The objects for ci/NAME.yaml with other values at the top."""
    with load_chart() as chart:
        return Rendered(chart, values_of(name) | more)


def flags_of(container: Manifest) -> dict[str, str]:
    """The flags that the service is started with; of a flag that is repeated the last."""
    pairs = (argument.partition("=") for argument in arguments_of(container))
    return {flag: value for flag, _, value in pairs}


def keys_of(volume: Manifest) -> Iterator[tuple[str, str, str]]:
    """Each file of a volume of Secrets and ConfigMaps: its path, its object, its key."""
    sources = [
        one for found in volume.get("projected", {}).get("sources", []) for one in found.values()
    ]
    sources += [volume[kind] for kind in ("secret", "configMap") if kind in volume]
    for source in sources:
        for item in source.get("items", []):
            yield item["path"], source.get("name") or source["secretName"], item["key"]


def files_of(pod: Manifest, container: Manifest) -> dict[str, tuple[str, str]]:
    """Each mounted file of a Secret or a ConfigMap by its path, as (object, key)."""
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    return {
        f"{mount['mountPath']}/{path}": (name, key)
        for mount in container["volumeMounts"]
        for path, name, key in keys_of(volumes[mount["name"]])
    }
