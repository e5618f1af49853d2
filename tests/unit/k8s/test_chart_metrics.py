"""What scalers and dashboards ask Prometheus for is what the services export, also when idle."""

import json
import re
from collections.abc import Callable

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, Sum

import coordinator.figures
import draft_worker.figures
import verify_worker.metrics
from outrider import telemetry
from outrider.model.blocks import BlockPool
from tests.support.chart import CHART, Rendered
from verify_worker.scheduler import Limits, Scheduler

METRIC = re.compile(r"outrider_[a-z_]+")
# Labels, which the PodMonitor sets.
LABELS = {"outrider_release", "outrider_model", "outrider_part"}
# The one of prometheus-adapter, made of outrider_draft_demand_seconds.
MADE = {"outrider_draft_demand"}
# A histogram is there from the first batch on.
HISTOGRAMS = {"outrider_draft_propose_duration_seconds_sum"}


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names on the Prometheus pages of services that have done nothing yet."""
    reader = InMemoryMetricReader()
    monkeypatch.setattr(telemetry, "meter", MeterProvider([reader]).get_meter)
    limits = Limits(context_len=64, vocab_size=8)
    scheduler = Scheduler(BlockPool(4), limits)
    verify_worker.metrics.export(lambda: scheduler, 4)
    coordinator.figures.Figures()
    draft_worker.figures.export(draft_worker.figures.Figures())
    data = reader.get_metrics_data()
    assert data is not None
    names = set()
    for resource in data.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                assert all(point.value == 0 for point in metric.data.data_points) or not (
                    metric.name.startswith("outrider_draft")
                )
                name = metric.name.replace(".", "_")
                counter = isinstance(metric.data, Sum) and metric.data.is_monotonic
                names.add(f"{name}_total" if counter else name)
    return names


@pytest.mark.parametrize("name", ["hpa", "keda"])
def test_scalers_ask_for_what_is_exported(
    rendered: Callable[[str], Rendered], exported: set[str], name: str
) -> None:
    found = rendered(name)
    kinds = ("HorizontalPodAutoscaler", "ScaledObject", "ConfigMap")
    asked = set(METRIC.findall(json.dumps(found.of(*kinds)))) - LABELS - MADE
    assert "outrider_streams_open" in asked
    assert asked <= exported


def test_dashboards_show_what_is_exported(exported: set[str]) -> None:
    for path in (CHART / "dashboards").glob("*.json"):
        dashboard = json.loads(path.read_text())
        asked = set(METRIC.findall(json.dumps(dashboard))) - LABELS
        assert "outrider_draft_demand_seconds_total" in asked
        assert asked - exported <= HISTOGRAMS


def test_the_glossary_lists_what_scalers_ask_for(exported: set[str]) -> None:
    glossary = (CHART.parents[1] / "docs" / "glossary.md").read_text()
    for name in (
        "outrider_draft_demand_seconds",
        "outrider_streams_open",
        "outrider_sessions_held",
    ):
        assert f"`{name}`" in glossary
        assert name in exported or f"{name}_total" in exported
