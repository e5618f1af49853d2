"""Streams that break, and how the caller's iterator goes on, against scripted coordinators."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from outrider import AsyncClient, Client
from outrider.client import Retry
from outrider.errors import (
    DeadlineError,
    FencedError,
    InternalError,
    OverloadedError,
    SessionExistsError,
    UnavailableError,
    UnknownSessionError,
)
from outrider.messages import FinishReason
from outrider.pb.v1 import coordinator_pb2 as pb
from tests.support.fake_coordinator import (
    PLAIN,
    SCRIPT,
    TWO,
    FakeCoordinator,
    Lost,
    Step,
    delta,
    serving,
    serving_in_thread,
    started,
)

DEADLINE_S = 20


async def until(condition: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.01)


Several = Callable[..., Any]
BROKEN: list[Step] = [*SCRIPT[:3], Lost()]
IDS = (5, 6, 7, 8)


@pytest.fixture
async def several() -> AsyncIterator[Several]:
    """Starts fake coordinators, each with its script, until the end of the test."""
    async with AsyncExitStack() as stack:

        async def start(*scripts: list[Step], **options: Any) -> list[FakeCoordinator]:
            return [
                await stack.enter_async_context(serving(script, **options)) for script in scripts
            ]

        yield start


def client_of(*fakes: FakeCoordinator, **options: Any) -> AsyncClient:
    return AsyncClient([fake.address for fake in fakes], **options)


async def cancelled_at(fake: FakeCoordinator) -> list[str]:
    assert await asyncio.to_thread(fake.cancel_came.wait, DEADLINE_S)
    return fake.cancels


async def test_the_iterator_goes_on_at_another_coordinator(several: Several) -> None:
    first, second = await several(BROKEN, SCRIPT)
    async with client_of(first, second) as client:
        generation = client.generate("Hi", max_tokens=9)
        chunks = [chunk async for chunk in generation]
        assert [chunk.text for chunk in chunks] == ["Hel", "lo w", "", "!"]
        assert [chunk.offset for chunk in chunks] == [0, 1, 3, 4]
        completion = await generation.complete()
        assert (completion.token_ids, completion.text) == (IDS, "Hello w!")
        assert generation.reconnects == 1
        # The next one is asked of the coordinator that answered.
        await client.complete("Hi")
    assert second.resumes == [pb.ResumeRequest(session_id=generation.session_id, offsets=[3])]
    assert (len(first.requests), len(second.requests)) == (1, 1)
    assert (first.cancels, second.cancels) == ([], [])


def test_a_killed_coordinator_is_replaced_under_a_synchronous_caller() -> None:
    with (
        serving_in_thread([*SCRIPT[:2], asyncio.Event()]) as first,
        serving_in_thread(SCRIPT) as second,
        Client([first.address, second.address]) as client,
    ):
        generation = client.generate("Hi")
        ids: list[int] = []
        for chunk in generation:
            ids += chunk.token_ids
            first.cut()
        assert tuple(ids) == IDS
        assert generation.complete().finish_reason is FinishReason.STOP
    assert second.resumes[0].offsets == [1]


async def test_each_of_several_completions_goes_on_from_its_own_offset(several: Several) -> None:
    first, second = await several([*TWO[:6], Lost()], TWO)
    async with client_of(first, second) as client:
        completions = await client.complete_all("Hi", n=2)
    assert [completion.text for completion in completions] == ["ab!", "ABC"]
    assert [len(completion.pieces) for completion in completions] == [2, 3]
    assert second.resumes[0].offsets == [2, 2]


async def test_a_first_call_that_broke_is_made_again_as_the_same_request(several: Several) -> None:
    first, second = await several([Lost()], SCRIPT)
    async with client_of(first, second) as client:
        completion = await client.complete("Hi")
        assert completion.token_ids == IDS
        (request,), (again,) = first.requests, second.requests
        assert request == again
        assert request.idempotency_key != ""
        assert request.HasField("seed")
        # Another completion is another call.
        await client.complete("Hi")
    other = second.requests[1]
    assert other.idempotency_key != request.idempotency_key
    assert (other.session_id, other.seed) != (request.session_id, request.seed)


async def test_a_coordinator_that_comes_back_goes_on(several: Several) -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(serving([*SCRIPT[:2], asyncio.Event()]))
        port = int(first.address.rpartition(":")[2])
        async with client_of(first) as client:
            stream = aiter(client.generate("Hi"))
            ids = list((await anext(stream)).token_ids)
            rest_of_it = asyncio.create_task(anext(stream))
            await stack.aclose()
            (second,) = await several(SCRIPT, port=port)
            ids += (await rest_of_it).token_ids
            ids += [i async for chunk in stream for i in chunk.token_ids]
    assert tuple(ids) == IDS
    assert second.resumes[0].offsets == [1]


async def test_a_session_whose_records_are_gone_is_made_again(several: Several) -> None:
    first, second = await several(BROKEN, SCRIPT)
    second.resume_script = [UnknownSessionError("Redis came back empty")]
    async with client_of(first, second) as client:
        generation = client.generate("Hi")
        chunks = [chunk async for chunk in generation]
        assert [chunk.text for chunk in chunks] == ["Hel", "lo w", "", "!"]
        assert [chunk.offset for chunk in chunks] == [0, 1, 3, 4]
    # With its seed, so that its tokens are the same, and its key.
    assert second.requests == first.requests


async def test_a_session_that_is_made_again_must_say_the_same(several: Several) -> None:
    first, second = await several(BROKEN, [started(), delta(0, (5, "Hel", PLAIN), (9, "p", PLAIN))])
    second.resume_script = [UnknownSessionError("Redis came back empty")]
    async with client_of(first, second) as client:
        generation = client.generate("Hi")
        with pytest.raises(InternalError, match=r"token 1 is another one.*coupled rule"):
            await generation.complete()
        assert await cancelled_at(second) == [generation.session_id]


async def test_a_stream_may_not_repeat_itself(several: Several) -> None:
    (fake,) = await several([*SCRIPT[:2], SCRIPT[1], *SCRIPT[2:]])
    async with client_of(fake) as client:
        with pytest.raises(InternalError, match="got tokens at 0, expected them at 1"):
            await client.complete("Hi")
        fake.script = BROKEN
        fake.resume_script = [started(), delta(4, (8, "", PLAIN))]
        with pytest.raises(InternalError, match="got tokens at 4, expected them at 3"):
            await client.complete("Hi")


async def test_each_token_buys_the_whole_time_again(several: Several) -> None:
    script: list[Step] = [SCRIPT[0]]
    for step in SCRIPT[1:4]:
        script += [step, Lost()]
    # No time at all, so a second failure without a token between them is one too many.
    retry = Retry(resume_s=0, first_pause_s=0)
    (fake,) = await several([*script, SCRIPT[4]])
    async with client_of(fake, retry=retry) as client:
        generation = client.generate("Hi")
        assert (await generation.complete()).token_ids == IDS
    assert generation.reconnects == 3
    assert [list(request.offsets) for request in fake.resumes] == [[1], [3], [4]]


async def test_started_alone_buys_no_time(several: Several) -> None:
    (fake,) = await several(BROKEN)
    fake.resume_script = [started(), Lost()]
    retry = Retry(resume_s=0.3, first_pause_s=0.02)
    async with client_of(fake, retry=retry) as client:
        with pytest.raises(UnavailableError, match=r"could not be resumed in \d+ tries"):
            await client.complete("Hi")
    assert len(fake.resumes) > 1


async def test_the_deadline_holds_over_all_tries(several: Several) -> None:
    (fake,) = await several(BROKEN)
    fake.resume_script = [started(), Lost()]
    async with client_of(fake) as client:
        generation = client.generate("Hi", timeout_s=1.0)
        with pytest.raises(DeadlineError):
            await generation.complete()
        # Nobody goes on with it, so it must not lie about until it expires.
        assert await cancelled_at(fake) == [generation.session_id]
    assert all(remaining <= 2 for remaining in fake.remaining_s)
    assert fake.remaining_s[-2] < fake.remaining_s[0]


async def test_a_session_that_was_taken_is_taken_back_but_not_for_ever(several: Several) -> None:
    (fake,) = await several([*SCRIPT[:3], FencedError("another coordinator has it")])
    retry = Retry(first_pause_s=0.01, longest_pause_s=0.01)
    async with client_of(fake, retry=retry) as client:
        fake.resume_script = SCRIPT
        assert (await client.complete("Hi")).token_ids == IDS
        fake.resume_script = [started(), FencedError("another coordinator has it")]
        with pytest.raises(FencedError, match="another coordinator"):
            await client.complete("Hi")


async def test_a_full_coordinator_is_left_for_another_one(several: Several) -> None:
    full: list[Step] = [OverloadedError("full", retry_after_s=60.0)]
    first, second = await several(full, SCRIPT)
    async with client_of(first, second) as client:
        assert (await client.complete("Hi")).token_ids == IDS
    second.script = full
    async with client_of(first, second) as client:
        with pytest.raises(OverloadedError, match="full") as raised:
            await client.complete("Hi")
    assert raised.value.retry_after_s == 60
    assert (len(first.requests), len(second.requests)) == (2, 2)


async def test_closing_the_client_cancels_what_runs(several: Several) -> None:
    (fake,) = await several([*SCRIPT[:2], asyncio.Event()])
    async with client_of(fake) as client:
        running = client.generate("Hi", session_id="mine")
        await anext(aiter(running))
    assert fake.cancels == ["mine"]
    assert (await running.complete()).token_ids == IDS[:1]


async def test_leaving_cancels_the_session_at_a_coordinator_that_answers(several: Several) -> None:
    first, second = await several([*SCRIPT[:2], asyncio.Event()], SCRIPT)
    async with AsyncExitStack() as stack:
        doomed = await stack.enter_async_context(serving([*SCRIPT[:2], asyncio.Event()]))
        async with client_of(doomed, second) as client:
            generation = client.generate("Hi")
            async for _ in generation:
                await stack.aclose()
                break
        # `close` has waited for it.
        assert second.cancels == [generation.session_id]
    async with client_of(first) as client:
        generation = client.generate("Hi", session_id="mine")
        await anext(aiter(generation))
        generation.cancel()
    assert first.cancels == ["mine"]


def test_a_synchronous_caller_that_leaves_cancels_the_session() -> None:
    with serving_in_thread([*SCRIPT[:2], asyncio.Event()]) as fake:
        with Client(fake.address, tenant="acme") as client:
            for _ in client.generate("Hi", session_id="mine"):
                break
        assert fake.cancels == ["mine"]
    assert [entry["outrider-tenant"] for entry in fake.metadata] == ["acme", "acme"]


def test_cancel_ends_the_pause_between_two_tries() -> None:
    with serving_in_thread(BROKEN) as fake:
        fake.resume_script = [Lost()]
        retry = Retry(first_pause_s=1e6, longest_pause_s=1e6, resume_s=1e9)
        with Client(fake.address, retry=retry) as client:
            generation = client.generate("Hi", session_id="mine")
            reader = threading.Thread(target=generation.complete)
            reader.start()
            while generation._call is not None:
                time.sleep(0.01)
            generation.cancel()
            reader.join(DEADLINE_S)
            assert not reader.is_alive()
        assert fake.cancels == ["mine"]


async def test_a_task_that_is_cancelled_in_a_pause_cancels_the_session(several: Several) -> None:
    (fake,) = await several(BROKEN)
    retry = Retry(first_pause_s=1e6, longest_pause_s=1e6, resume_s=1e9)
    async with client_of(fake, retry=retry) as client:
        generation = client.generate("Hi", session_id="mine")
        reading = asyncio.create_task(generation.complete())
        await until(lambda: generation._call is None, "a pause")
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert await cancelled_at(fake) == ["mine"]


async def test_tenant_and_options_of_sessions_are_sent(several: Several) -> None:
    first, second = await several(BROKEN, SCRIPT)
    options = {"session_id": "mine", "idempotency_key": "once", "previous_session_id": "before"}
    async with client_of(first, second, tenant="acme") as client:
        await client.complete("Hi", **options)
        await client.cancel("running")
    (request,) = first.requests
    for name, value in options.items():
        assert getattr(request, name) == value
    sent = [entry.get("outrider-tenant") for entry in [*first.metadata, *second.metadata]]
    assert sent == ["acme"] * 3


async def test_a_name_stands_for_several_coordinators(
    several: Several, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first,) = await several(SCRIPT)
    port = int(first.address.rpartition(":")[2])
    (second,) = await several(SCRIPT, port=port, host="127.0.0.2")
    addresses = ["127.0.0.1", "127.0.0.2"]

    def look_up(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        if host != "coordinators":
            raise socket.gaierror(f"no such name: {host}")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    for fake in (first, second):
        fake.script = BROKEN
        fake.resume_script = [UnavailableError("this coordinator is stopping")]
    retry = Retry(resume_s=0.3)
    async with AsyncClient(f"coordinators:{port}", retry=retry) as client:
        with pytest.raises(UnavailableError, match=r"at 127.0.0.\d:\d+, 127.0.0.\d:\d+; at last"):
            await client.complete("Hi")
        assert first.resumes
        assert second.resumes
        for fake in (first, second):
            fake.script = SCRIPT
        assert (await client.complete("Hi")).token_ids == IDS
    async with AsyncClient("nowhere:1", retry=Retry(start_s=0.1)) as client:
        with pytest.raises(UnavailableError, match=r"IP address: nowhere:1: no such name"):
            await client.complete("Hi")
    with Client(f"coordinators:{port}") as synchronous:
        # Made while this loop is blocked, so only the connection is looked at.
        synchronous._coordinators.look_up()
        assert synchronous._coordinators.directory.first().startswith("127.0.0.")


async def test_an_id_that_is_taken_is_said_at_once(several: Several) -> None:
    (fake,) = await several([SessionExistsError("session 'mine' is running")])
    async with client_of(fake) as client:
        with pytest.raises(SessionExistsError):
            await client.complete("Hi", session_id="mine")
    assert len(fake.requests) == 1
    assert fake.cancels == []
