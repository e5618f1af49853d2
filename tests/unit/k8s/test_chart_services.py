"""The chart starts services with settings that they have, and stops them in time."""

from collections.abc import Callable, Iterator
from typing import Any

import click
import pytest

import coordinator.__main__
import coordinator.app
import coordinator.config
import coordinator.sessions
import draft_worker.app
import draft_worker.config
import verify_worker.app
import verify_worker.config
from outrider import rpc
from outrider.config import command
from tests.support import health_probe
from tests.support.chart import (
    FILES,
    NAMESPACE,
    RELEASE,
    Rendered,
    arguments_of,
    load_chart,
    values_of,
)

Render = Callable[[str], Rendered]
SETTINGS = {
    "coordinator": coordinator.config.Settings,
    "verify-worker": verify_worker.config.Settings,
    "draft-worker": draft_worker.config.Settings,
}
# From SIGTERM, beside the drain: what each service gives its last frames and steps.
STOPS_S = {
    "coordinator": coordinator.app.GRACE_S + coordinator.sessions.STOP_S,
    "verify-worker": verify_worker.app._STREAM_GRACE_S + verify_worker.app._STOP_S,
    "draft-worker": draft_worker.app.STREAM_GRACE_S,
}


def settings_of(service: str, arguments: list[str]) -> Any:
    """The settings that the service would run with; raises click's errors."""
    seen: list[Any] = []
    made: click.Command = command(SETTINGS[service], seen.append, name=service)
    made.main(arguments, standalone_mode=False)
    return seen[0]


def started(found: Rendered) -> Iterator[tuple[dict[str, Any], dict[str, Any], str, Any]]:
    for pod, container, service in found.services():
        yield pod, container, service, settings_of(service, arguments_of(container))


@pytest.mark.parametrize("name", FILES)
def test_services_take_their_arguments(rendered: Render, name: str) -> None:
    services = {service for _, _, service, _ in started(rendered(name))}
    assert services >= {"coordinator", "verify-worker"}
    assert ("draft-worker" in services) is (name != "everything-off")


def test_a_flag_that_no_service_has_would_be_found() -> None:
    with pytest.raises(click.UsageError, match="--replicas"):
        settings_of("coordinator", ["--model=/m", "--redis-url=redis://r", "--replicas=2"])


@pytest.mark.parametrize("name", FILES)
def test_no_setting_comes_from_the_environment(rendered: Render, name: str) -> None:
    for _, pod in rendered(name).pods():
        # A Service called outrider would otherwise set OUTRIDER_PORT to tcp://….
        assert pod["spec"]["enableServiceLinks"] is False
        for container in pod["spec"]["containers"]:
            for variable in container.get("env", []):
                assert not variable["name"].startswith("OUTRIDER_")


@pytest.mark.parametrize("name", FILES)
def test_grace_periods_are_ordered(rendered: Render, name: str) -> None:
    for pod, container, service, settings in started(rendered(name)):
        pre_stop = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {"seconds": 0})
        needed_s = pre_stop["seconds"] + settings.drain_timeout_s + STOPS_S[service]
        assert pod["spec"]["terminationGracePeriodSeconds"] > needed_s


def test_one_value_moves_every_grace_period(rendered: Render) -> None:
    short, long = rendered("minimal"), rendered("everything-on")
    for (pod, _, _, settings), (other, _, _, others) in zip(
        started(short), started(long), strict=True
    ):
        assert others.drain_timeout_s - settings.drain_timeout_s == 60
        graces = [p["spec"]["terminationGracePeriodSeconds"] for p in (pod, other)]
        assert graces[1] - graces[0] == 60


def asked(probe: dict[str, Any], settings: Any) -> tuple[int, str]:
    """The port and the service that a probe asks for: by the kubelet, which speaks no TLS."""
    if not settings.tls_ca:
        assert "exec" not in probe
        return probe["grpc"]["port"], probe["grpc"].get("service", "")
    assert "grpc" not in probe
    found = health_probe.parse(probe["exec"]["command"])
    assert max(found.connect_timeout, found.rpc_timeout) <= probe["timeoutSeconds"]
    shown = (found.tls_ca_cert, found.tls_client_cert, found.tls_client_key)
    assert shown == (settings.tls_ca, settings.tls_cert, settings.tls_key)
    host, _, port = found.addr.partition(":")
    assert host == "localhost"
    return int(port), found.service


@pytest.mark.parametrize("name", FILES)
def test_probes_ask_the_health_service(rendered: Render, name: str) -> None:
    for _, container, _, settings in started(rendered(name)):
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["grpc"] == settings.port
        assert ports.get("metrics", 0) == settings.metrics_port
        startup, liveness, readiness = (
            container[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")
        )
        for probe in (startup, liveness):
            assert asked(probe, settings) == (settings.port, rpc.LIVENESS)
        # Draining and loading are not ready, and no reason to start again.
        assert asked(readiness, settings) == (settings.port, "")


@pytest.mark.parametrize("name", FILES)
def test_long_loads_are_not_killed(rendered: Render, name: str) -> None:
    for item, pod in rendered(name).pods():
        for container in pod["spec"]["containers"]:
            if container["name"] not in SETTINGS:
                continue
            probe = container["startupProbe"]
            allowed_s = probe["periodSeconds"] * probe["failureThreshold"]
            assert allowed_s >= (600 if container["name"] == "coordinator" else 3600)
            if item["kind"] == "Deployment":
                assert item["spec"]["progressDeadlineSeconds"] > allowed_s


def test_a_hang_is_not_called_dead_before_the_service_says_so(rendered: Render) -> None:
    for _, container, service, settings in started(rendered("minimal")):
        liveness = container["livenessProbe"]
        if service != "coordinator":
            assert settings.engine_silence_s < liveness["periodSeconds"] * (
                liveness["failureThreshold"] + 1
            )


def test_flags_of_a_model_go_before_those_of_all(rendered: Render) -> None:
    settings = {
        (pod["metadata"]["labels"]["outrider/model"], service): found
        for pod, _, service, found in started(rendered("two-models"))
    }
    assert len(settings) == 6
    large, small = settings["main", "verify-worker"], settings["small", "verify-worker"]
    assert (large.device, large.dtype, large.model) == ("cuda", "bfloat16", "/models/large")
    assert (small.device, small.threads, small.kv_memory) == ("cpu", 4, "2GiB")
    assert settings["main", "draft-worker"].draft_model == "/models/large-draft"
    assert settings["small", "draft-worker"].drafter == "ngram"
    assert settings["main", "coordinator"].served_name == "large"
    assert {found.redis_url for found in settings.values()} == {"redis://rel-outrider-redis:6379/0"}


@pytest.mark.parametrize("name", FILES)
def test_all_parts_of_a_model_and_no_others_are_one_group(rendered: Render, name: str) -> None:
    groups = {
        (pod["metadata"]["labels"]["outrider/model"], found.group)
        for pod, _, _, found in started(rendered(name))
    }
    assert groups == {(model, f"{NAMESPACE}/{RELEASE}/{model}") for model, _ in groups}


def test_kinds_of_flags(rendered: Render) -> None:
    settings = {service: found for _, _, service, found in started(rendered("everything-on"))}
    assert settings["coordinator"].trust_draft_worker == ("all",)
    assert settings["coordinator"].max_queued == 1_000_000
    assert settings["verify-worker"].prefix_cache is False
    assert settings["verify-worker"].calibrate is True
    assert settings["draft-worker"].share_outputs is False


def test_what_hangs_gets_no_time_to_drain(rendered: Render) -> None:
    for pod, container, _ in rendered("minimal").services():
        grace_s = container["livenessProbe"]["terminationGracePeriodSeconds"]
        before_s = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {})
        assert before_s.get("seconds", 0) < grace_s < pod["spec"]["terminationGracePeriodSeconds"]


def test_services_listen_where_they_are_told() -> None:
    with load_chart() as chart:
        told = Rendered(chart, values_of("minimal") | {"listenAddress": "::"})
    for _, container, _ in told.services():
        assert [a for a in container["args"] if a.startswith("--host")] == ["--host=::"]
