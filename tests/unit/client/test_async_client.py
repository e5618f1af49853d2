"""The asynchronous client against a scripted coordinator."""

import asyncio
import gc
from collections.abc import AsyncIterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from outrider import AsyncClient
from outrider.client import Retry
from outrider.errors import (
    OverloadedError,
    UnavailableError,
    UnknownSessionError,
)
from outrider.messages import FinishReason
from tests.support.fake_coordinator import (
    PLAIN,
    SCRIPT,
    FakeCoordinator,
    delta,
    serving,
    started,
)

DEADLINE_S = 20


@pytest.fixture
async def fake() -> AsyncIterator[FakeCoordinator]:
    async with serving(SCRIPT) as coordinator:
        yield coordinator


@pytest.fixture
async def client(fake: FakeCoordinator) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(fake.address) as made:
        yield made


def endless() -> list[object]:
    return [started(), delta(0, (5, "Hel", PLAIN)), asyncio.Event()]


async def was_cancelled(fake: FakeCoordinator) -> bool:
    return await asyncio.to_thread(fake.cancelled.wait, DEADLINE_S)


async def test_stream_and_completion(client: AsyncClient) -> None:
    generation = client.generate("Hi")
    chunks = [chunk async for chunk in generation]
    assert [chunk.text for chunk in chunks] == ["Hel", "lo w", "", "!"]
    completion = await generation.complete()
    assert completion.token_ids == (5, 6, 7, 8)
    assert completion.speculation.rounds == 3
    assert (await client.complete(token_ids=[1])).text == completion.text


async def test_many_streams_at_once(client: AsyncClient, fake: FakeCoordinator) -> None:
    completions = await asyncio.gather(*(client.complete(f"{i}") for i in range(20)))
    assert len({completion.session_id for completion in completions}) == 20
    assert {completion.text for completion in completions} == {"Hello w!"}
    assert sorted(int(request.text) for request in fake.requests) == list(range(20))


async def test_leaving_the_loop_cancels_the_call() -> None:
    async with serving(endless()) as fake, AsyncClient(fake.address) as client:
        generation = client.generate("Hi")
        async for _ in generation:
            break
        gc.collect()
        assert await was_cancelled(fake)
        assert (await generation.complete()).finish_reason is FinishReason.CANCELLED


async def test_cancel_by_the_caller_ends_the_iteration() -> None:
    async with serving(endless()) as fake, AsyncClient(fake.address) as client:
        async with client.generate("Hi") as generation:
            async for _ in generation:
                asyncio.get_running_loop().call_soon(generation.cancel)
        assert (await generation.complete()).text == "Hel"
        assert await was_cancelled(fake)


async def test_cancelled_task_stays_cancelled_and_cancels_the_call() -> None:
    async with serving(endless()) as fake, AsyncClient(fake.address) as client:
        first = asyncio.Event()

        async def read() -> None:
            async for _ in client.generate("Hi"):
                first.set()

        task = asyncio.create_task(read())
        await first.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await was_cancelled(fake)


async def test_errors_are_typed(client: AsyncClient, fake: FakeCoordinator) -> None:
    fake.script = [started(), OverloadedError("full")]
    with pytest.raises(OverloadedError, match="full"):
        await client.complete("Hi")
    with pytest.raises(UnknownSessionError):
        await client.get_session("other")
    assert (await client.get_session("known")).verify_worker_id == "verify-1"
    assert await client.cancel("running")
    assert (await client.list_models())[0].name == "fake"
    assert (await client.status()).workers == ()


async def test_coordinator_that_goes_away_in_mid_stream_is_unavailable() -> None:
    at_once = Retry(start_s=0, resume_s=0)
    async with AsyncClient("127.0.0.1:1", retry=at_once) as nobody:
        with pytest.raises(UnavailableError, match="outrider up"):
            await nobody.complete("Hi")
    async with serving(endless()) as fake:
        client = AsyncClient(fake.address, retry=at_once)
        stream = aiter(client.generate("Hi"))
        assert (await anext(stream)).text == "Hel"
    with pytest.raises(UnavailableError, match=f"lost the connection.*{fake.address}"):
        await anext(stream)
    await client.close()


async def test_traceparent_is_sent_only_while_tracing(
    client: AsyncClient, fake: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.complete("Hi")
    assert "traceparent" not in fake.metadata[0]
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    await client.complete("Hi", session_id="traced")
    (span,) = exporter.get_finished_spans()
    assert span.name == "outrider.generate"
    assert (
        f"{span.context.trace_id:032x}-{span.context.span_id:016x}"
        in (fake.metadata[1]["traceparent"])
    )
    assert span.attributes is not None
    assert span.attributes["outrider.session_id"] == "traced"
    provider.shutdown()
