"""An OpenTelemetry collector that keeps the spans it gets: a real OTLP gRPC server."""

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import (
    metrics_service_pb2,
    metrics_service_pb2_grpc,
)
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class Spans(trace_service_pb2_grpc.TraceServiceServicer):
    """The spans by name, each with its trace id in hex."""

    def __init__(self) -> None:
        self.trace_ids: dict[str, set[str]] = {}

    async def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.trace_ids.setdefault(span.name, set()).add(span.trace_id.hex())
        return trace_service_pb2.ExportTraceServiceResponse()


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    async def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        return metrics_service_pb2.ExportMetricsServiceResponse()


@asynccontextmanager
async def collector(
    address: str = "127.0.0.1:0", *, inside: AbstractContextManager[None] | None = None
) -> AsyncIterator[tuple[str, Spans]]:
    """The endpoint to export to, and what has come there; its socket is made `inside`."""
    server = grpc.aio.server()
    spans = Spans()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(spans, server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_Metrics(), server)
    with inside or nullcontext():
        port = server.add_insecure_port(address)
    await server.start()
    try:
        yield f"http://{address.rpartition(':')[0]}:{port}", spans
    finally:
        await server.stop(None)
