"""Traces and metrics: one OpenTelemetry setup for every service.

Off by default, and then free: the API's no-op tracer and meter. Traces go to an OTLP
endpoint; metrics go there too, or to a Prometheus page on a port. A trace follows a session
from the client's call to the draft worker: between workers, which share one stream for many
sessions, the W3C `traceparent` travels inside the messages.
"""

from collections.abc import Callable, Iterable

from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_PROPAGATOR = TraceContextTextMapPropagator()


def start(
    service: str,
    *,
    instance: str = "",
    otlp_endpoint: str | None = None,
    metrics_host: str = "127.0.0.1",
    metrics_port: int = 0,
) -> Callable[[], None]:
    """Install exporters for this process and return the function that flushes and ends them.

    `otlp_endpoint` is an OTLP gRPC address such as http://collector:4317. The Prometheus page
    is at `metrics_host`:`metrics_port`; port 0 opens none. With neither, nothing is
    installed. A collector that is down costs nothing but the data: exporting happens in the
    background with bounded buffers.
    """
    if not otlp_endpoint and not metrics_port:
        return lambda: None
    from outrider import _exporters

    return _exporters.install(service, instance, otlp_endpoint, metrics_host, metrics_port)


def tracer(name: str) -> trace.Tracer:
    """The tracer of a module."""
    return trace.get_tracer(name)


def meter(name: str) -> metrics.Meter:
    """The meter of a module."""
    return metrics.get_meter(name)


def traceparent(context: Context | None = None) -> str:
    """The current span as a W3C traceparent; empty when nothing is traced."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context=context)
    return carrier.get("traceparent", "")


def context_of(parent: str) -> Context:
    """The context that a traceparent names; an empty one starts a new trace."""
    return _PROPAGATOR.extract({"traceparent": parent} if parent else {})


def observe(
    name: str, instrument: str, read: Callable[[], float], *, unit: str = "1", description: str
) -> None:
    """Export `read()` as an observable counter that starts at once, also when idle."""

    def callback(_: metrics.CallbackOptions) -> Iterable[metrics.Observation]:
        return [metrics.Observation(read())]

    meter(name).create_observable_counter(
        instrument, callbacks=[callback], unit=unit, description=description
    )
