"""Names, labels and arguments are what was given, whatever YAML would make of it."""

from typing import Any

import helm_python
import pytest
import yaml

from tests.support.chart import (
    COMPONENT,
    NAMESPACE,
    Rendered,
    arguments_of,
    flags_of,
    load_chart,
    rendered_with,
    values_of,
)

LABELS = ("app.kubernetes.io/name", "app.kubernetes.io/instance", COMPONENT, "outrider/model")


class OnceLoader(yaml.SafeLoader):
    """Takes no mapping that has a key twice, as the API server does not."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"twice in {node.start_mark}: {keys}"
        return super().construct_mapping(node, deep)


@pytest.mark.parametrize("served", ["chat: large", "chat #1", '"chat"', "{chat}"])
def test_the_name_of_a_model_may_have_any_characters(served: str) -> None:
    main = values_of("minimal")["models"]["main"] | {"servedName": served, "target": f"/m/{served}"}
    for _, container, service in rendered_with("minimal", models={"main": main}).services():
        flags = flags_of(container)
        if service == "coordinator":
            assert flags["--served-name"] == served
        if service != "draft-worker":
            assert flags["--model"] == f"/m/{served}"


def test_names_that_look_like_numbers_and_truths_stay_names() -> None:
    model = values_of("minimal")["models"]["main"]
    values = {
        "fullnameOverride": "chat",
        "models": {"on": model, "y": model, "main": None},
        "commonLabels": {"team": "1", "ok": "true"},
        "monitoring": {"podMonitor": {"enabled": True}},
        "auth": {"tokensSecret": {"name": "17", "key": "1"}},
        "redis": {"passwordSecret": {"name": "1e3", "key": "0"}, "url": "redis://r"},
        "coordinator": {"priorityClassName": "1", "serviceAccount": {"name": "2"}},
        "verify": {"runtimeClassName": "0", "autoscaling": {"scaler": "hpa"}},
    }
    with load_chart() as chart:
        found = Rendered(chart, values, release="2024")
    for item in found.objects:
        assert isinstance(item["metadata"]["name"], str)
        labels = item["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == "2024"
        assert (labels["team"], labels["ok"]) == ("1", "true")
        assert labels.get("outrider/model", "on") in {"on", "y"}
    (monitor,) = found.of("PodMonitor")
    assert monitor["spec"]["selector"]["matchLabels"]["app.kubernetes.io/instance"] == "2024"
    for pod, container, service in found.services():
        assert all(isinstance(word, str) for word in arguments_of(container))
        volumes = {volume["name"]: volume.get("secret") for volume in pod["spec"]["volumes"]}
        assert volumes["redis-password"]["secretName"] == "1e3"
        assert volumes["redis-password"]["items"][0]["key"] == "0"
        if service == "coordinator":
            assert volumes["tokens"]["secretName"] == "17"
            assert volumes["tokens"]["items"][0]["key"] == "1"
            assert pod["spec"]["priorityClassName"] == "1"
            assert pod["spec"]["serviceAccountName"] == "2"


@pytest.mark.parametrize("name", ["everything-on", "cert-manager"])
def test_labels_of_ones_own_do_not_replace_those_that_select(name: str) -> None:
    stolen = dict.fromkeys((*LABELS, "outrider/metrics"), "stolen") | {"team": "a"}
    values = values_of(name) | {"commonLabels": stolen}
    values["monitoring"] = {
        kind: settings | {"labels": {"team": "b"}}
        for kind, settings in values["monitoring"].items()
        if kind != "prometheusAdapter"
    }
    with load_chart() as chart:
        texts = chart.render(values, name="rel", namespace=NAMESPACE)
        found = Rendered(chart, values)
    for path, text in texts.items():
        if path.endswith(".yaml"):
            list(yaml.load_all(text, OnceLoader))
    for item in found.of("Deployment", "StatefulSet"):
        selector = item["spec"]["selector"]["matchLabels"]
        assert "stolen" not in selector.values()
        labels = item["spec"]["template"]["metadata"]["labels"]
        assert {key: labels[key] for key in selector} == selector
        assert labels["team"] == "a"
    for item in found.of("PodMonitor", "ServiceMonitor"):
        assert item["metadata"]["labels"]["team"] == "b"
    for service in found.of("Service"):
        if service["metadata"]["name"].endswith("-stats"):
            assert service["metadata"]["labels"]["outrider/metrics"] == "true"


@pytest.mark.parametrize("release", ["2024", "chat.v2", "4.2"])
def test_a_release_that_can_name_no_service_is_refused(release: str) -> None:
    with load_chart() as chart:
        with pytest.raises(helm_python.HelmRenderError, match="fullnameOverride"):
            chart.render(values_of("minimal"), name=release, namespace=NAMESPACE)
        chart.render(
            values_of("minimal") | {"fullnameOverride": "chat"}, name=release, namespace=NAMESPACE
        )


def test_long_names_that_begin_alike_stay_apart() -> None:
    whole: set[str] = set()
    for release in (
        "team-inference-production-region-eu",
        "team-inference-production-region-us",
        "chat",
    ):
        with load_chart() as chart:
            found = Rendered(chart, values_of("minimal"), release=release)
        names = {item["metadata"]["name"] for item in found.of("StatefulSet")}
        assert not names & whole
        assert all(name.startswith(release[:23]) for name in names)
        whole |= names
    assert "chat-outrider-main-verify" in whole
