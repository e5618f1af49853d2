"""The OpenTelemetry SDK behind `outrider.telemetry`; imported only when telemetry is on."""

import logging
import time
from collections.abc import Callable, Sequence

from opentelemetry import metrics, trace
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from prometheus_client import start_http_server

from outrider import logs
from outrider.errors import AddressInUseError

# With all its retries; a process that ends waits this long for a collector that is down.
EXPORT_TIMEOUT_S = 2
# Where the exporters and what feeds them log, and how often what they say is passed on.
EXPORTERS = ("opentelemetry.exporter", "opentelemetry.sdk")
COMPLAINT_EVERY_S = 300.0


class Complaints(logging.Handler):
    """Passes on that exports fail: the first time, then once in a while with their number."""

    def __init__(
        self, service: str, instance: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(logging.WARNING)
        # Exporters have threads of their own, which lack the fields of the process.
        self._log = logs.get(__name__).bind(service=service, instance=instance)
        self._clock = clock
        self._failures = 0
        self._told_at: float | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Count what an exporter says, and tell it if it is time."""
        self._failures += 1
        now = self._clock()
        if self._told_at is not None and now - self._told_at < COMPLAINT_EVERY_S:
            return
        self._told_at = now
        self._log.warning(
            "telemetry is not exported",
            error=record.getMessage(),
            failures=self._failures,
            next_report_s=COMPLAINT_EVERY_S,
        )


def listen(complaints: Complaints) -> Callable[[], None]:
    """Let `complaints` alone say what the exporters log, until the returned function is called."""
    loggers = [logging.getLogger(name) for name in EXPORTERS]
    propagated = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(complaints)
        logger.propagate = False

    def stop() -> None:
        for logger, propagate in zip(loggers, propagated, strict=True):
            logger.removeHandler(complaints)
            logger.propagate = propagate

    return stop


class SpanExporter(OTLPSpanExporter):
    """Once the process is `ending`, what follows a batch that failed is given up.

    Thousands of spans may be waiting, and each batch would be tried until its time is up.
    """

    ending = False
    _given_up = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch."""
        if self._given_up:
            return SpanExportResult.FAILURE
        result = super().export(spans)
        self._given_up = self.ending and result is SpanExportResult.FAILURE
        return result


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
            server, _ = start_http_server(metrics_port, addr=metrics_host.strip("[]"))
        except OSError as error:
            raise AddressInUseError(
                f"can't serve metrics on port {metrics_port}: {error.strerror}; "
                "choose another --metrics-port"
            ) from error
        stops.append(server.shutdown)
    if otlp_endpoint:
        stop_listening = listen(Complaints(service, instance))
        insecure = not otlp_endpoint.startswith("https://")
        readers.append(
            PeriodicExportingMetricReader(
                OTLPMetricExporter(otlp_endpoint, insecure=insecure, timeout=EXPORT_TIMEOUT_S)
            )
        )
        traces = TracerProvider(resource=resource)
        exporter = SpanExporter(otlp_endpoint, insecure=insecure, timeout=EXPORT_TIMEOUT_S)
        traces.add_span_processor(BatchSpanProcessor(exporter))
        trace.set_tracer_provider(traces)
        stops += [lambda: setattr(exporter, "ending", True), traces.shutdown]
    meters = MeterProvider(resource=resource, metric_readers=readers)
    metrics.set_meter_provider(meters)
    stops.append(meters.shutdown)
    if otlp_endpoint:
        # Last: the flush at the end fails as well when the collector is down.
        stops.append(stop_listening)

    def stop() -> None:
        for end in stops:
            end()

    return stop
