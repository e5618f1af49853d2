"""The OpenTelemetry SDK behind `outrider.telemetry`; imported only when telemetry is on."""

from collections.abc import Callable

from opentelemetry import metrics, trace
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from prometheus_client import start_http_server

from outrider.errors import AddressInUseError

# With all its retries; a process that ends waits this long for a collector that is down.
EXPORT_TIMEOUT_S = 2


def install(
    service: str, instance: str, otlp_endpoint: str | None, metrics_host: str, metrics_port: int
) -> Callable[[], None]:
    """Set the process-wide providers; the returned function flushes and ends them."""
    attributes = {"service.name": f"outrider-{service}", "service.instance.id": instance}
    resource = Resource.create(attributes)
    readers: list[MetricReader] = []
    stops: list[Callable[[], object]] = []
    if metrics_port:
        readers.append(PrometheusMetricReader())
        try:
            server, _ = start_http_server(metrics_port, addr=metrics_host)
        except OSError as error:
            raise AddressInUseError(
                f"can't serve metrics on port {metrics_port}: {error.strerror}; "
                "choose another --metrics-port"
            ) from error
        stops.append(server.shutdown)
    if otlp_endpoint:
        insecure = not otlp_endpoint.startswith("https://")
        readers.append(
            PeriodicExportingMetricReader(
                OTLPMetricExporter(otlp_endpoint, insecure=insecure, timeout=EXPORT_TIMEOUT_S)
            )
        )
        traces = TracerProvider(resource=resource)
        exporter = OTLPSpanExporter(otlp_endpoint, insecure=insecure, timeout=EXPORT_TIMEOUT_S)
        traces.add_span_processor(BatchSpanProcessor(exporter))
        trace.set_tracer_provider(traces)
        stops.append(traces.shutdown)
    meters = MeterProvider(resource=resource, metric_readers=readers)
    metrics.set_meter_provider(meters)
    stops.append(meters.shutdown)

    def stop() -> None:
        for end in stops:
            end()

    return stop
