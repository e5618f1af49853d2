"""Counters that are there from the start, and one trace through to the verify worker."""

from collections.abc import AsyncIterator

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from outrider import telemetry
from outrider.pb.v1 import coordinator_pb2 as pb
from tests.support.coordinator_stack import EOS, Completion, Stack, running_stack, token_ids

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{SPAN}-01"


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_stack() as stack:
        yield stack


def counts(reader: InMemoryMetricReader) -> dict[str, float]:
    """Every counter by name and attributes, such as `drafts` or `finished/stop`."""
    data = reader.get_metrics_data()
    assert data is not None
    return {
        "/".join(
            [metric.name.removeprefix("outrider_"), *map(str, point.attributes.values())]
        ): point.value
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    }


async def test_counters(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = InMemoryMetricReader()
    meters = MeterProvider([reader])
    monkeypatch.setattr(telemetry, "meter", meters.get_meter)
    await stack.start_coordinator()
    per_position = "delivered_spec_decode_num_accepted_tokens_per_pos"
    assert counts(reader) == {
        "streams_open": 0,
        "sessions_started": 0,
        "sessions_paused": 0,
        "sessions_resumed": 0,
        "requests_queued": 0,
        "requests_refused": 0,
        "sessions_finished/stop": 0,
        "sessions_finished/length": 0,
        "sessions_finished/cancelled": 0,
        "sessions_finished/error": 0,
        "completion_tokens": 0,
        "delivered_spec_decode_num_drafts": 0,
        "delivered_spec_decode_num_draft_tokens": 0,
        "delivered_spec_decode_num_accepted_tokens": 0,
        f"{per_position}/0": 0,
    }
    worker = await stack.add_verify()
    done = stack.generate()
    start = await worker.started()
    assert counts(reader)["streams_open"] == 1
    worker.say(
        worker.progress(start, "xyz", draft_tokens=2),
        worker.progress(start, [*token_ids("a"), EOS], base_len=5),
    )
    await done.end()
    assert counts(reader) == {
        "streams_open": 0,
        "sessions_started": 1,
        "sessions_paused": 0,
        "sessions_resumed": 0,
        "requests_queued": 0,
        "requests_refused": 0,
        "sessions_finished/stop": 1,
        "sessions_finished/length": 0,
        "sessions_finished/cancelled": 0,
        "sessions_finished/error": 0,
        "completion_tokens": 5,
        "delivered_spec_decode_num_drafts": 1,
        "delivered_spec_decode_num_draft_tokens": 2,
        "delivered_spec_decode_num_accepted_tokens": 2,
        f"{per_position}/0": 1,
        f"{per_position}/1": 1,
    }
    meters.shutdown()


async def test_trace_goes_on(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry, "tracer", tracers.get_tracer)
    await stack.start_coordinator()
    worker = await stack.add_verify()
    request = pb.GenerateRequest(session_id="s", text="ab")
    done = Completion(stack.client.Generate(request, metadata=[("traceparent", TRACEPARENT)]))
    start = await worker.started()
    worker.say(worker.progress(start, [EOS]))
    await done.end()
    await stack.coordinator.stop()
    (span,) = exporter.get_finished_spans()
    assert span.parent is not None
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, SPAN)
    assert start.traceparent == f"00-{TRACE}-{span.context.span_id:016x}-01"
    assert span.attributes is not None
    assert span.attributes["outrider.session_id"] == "s"
    assert span.attributes["outrider.finish_reason"] == "stop"
    tracers.shutdown()


async def test_trace_passes_through_when_nothing_is_collected(stack: Stack) -> None:
    await stack.start_coordinator()
    worker = await stack.add_verify()
    request = pb.GenerateRequest(session_id="s", text="ab")
    done = Completion(stack.client.Generate(request, metadata=[("traceparent", TRACEPARENT)]))
    start = await worker.started()
    assert start.traceparent == TRACEPARENT
    worker.say(worker.progress(start, [EOS]))
    await done.end()
