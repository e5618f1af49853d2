"""The synchronous client against a scripted coordinator."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from outrider import Client
from outrider.client import Retry
from outrider.errors import (
    ConfigError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
    UnknownSessionError,
)
from outrider.messages import FinishReason, TokenOrigin
from outrider.pb.v1 import coordinator_pb2 as pb
from outrider.pb.v1 import types_pb2
from tests.support.fake_coordinator import (
    PLAIN,
    SCRIPT,
    FakeCoordinator,
    delta,
    finished,
    serving_in_thread,
    started,
)

DEADLINE_S = 20
AT_ONCE = Retry(start_s=0, resume_s=0)


@pytest.fixture
def fake() -> Iterator[FakeCoordinator]:
    with serving_in_thread(SCRIPT) as coordinator:
        yield coordinator


@pytest.fixture
def client(fake: FakeCoordinator) -> Iterator[Client]:
    with Client(fake.address) as made:
        yield made


def test_chunks_carry_text_ids_origins_and_offsets(client: Client) -> None:
    chunks = list(client.generate("Hi"))
    assert [chunk.text for chunk in chunks] == ["Hel", "lo w", "", "!"]
    assert [chunk.token_ids for chunk in chunks] == [(5,), (6, 7), (8,), ()]
    assert [chunk.offset for chunk in chunks] == [0, 1, 3, 4]
    assert chunks[1].pieces[1].origin is TokenOrigin.BONUS
    assert chunks[1].pieces[0].text == "lo"


def test_completion_has_everything(client: Client) -> None:
    completion = client.complete("Hi", session_id="mine")
    assert completion.text == "Hello w!"
    assert completion.token_ids == (5, 6, 7, 8)
    assert completion.finish_reason is FinishReason.STOP
    usage = completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 4, 2)
    assert completion.speculation.acceptance_rate == 0.25
    assert completion.timings.first_token_s == 0.25
    assert completion.timings.total_s == 1.5
    assert (completion.session_id, completion.model, completion.seed) == ("mine", "fake", 7)


def test_complete_after_iterating_gives_the_whole(client: Client) -> None:
    generation = client.generate("Hi")
    streamed = "".join(chunk.text for chunk in generation)
    assert generation.complete().text == streamed
    assert list(generation) == []


def test_request_carries_every_option(client: Client, fake: FakeCoordinator) -> None:
    client.complete(
        messages=[{"role": "user", "content": "Hi"}],
        model="fake",
        max_tokens=0,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        seed=2**64 - 1,
        stop=["a", "b"],
        stop_token_ids=[1, 2],
        speculation=3,
        session_id="mine",
        timeout_s=100.0,
    )
    request = fake.requests[0]
    assert request.WhichOneof("prompt") == "messages"
    assert request.messages.messages[0] == pb.ChatMessage(role="user", content="Hi")
    assert (request.session_id, request.model) == ("mine", "fake")
    assert request.HasField("max_tokens")
    assert (request.temperature, request.top_p, request.top_k) == (0.5, 0.9, 40)
    assert request.seed == 2**64 - 1
    assert (list(request.stop), list(request.stop_token_ids)) == (["a", "b"], [1, 2])
    assert request.speculation.mode == types_pb2.SPECULATION_MODE_ON
    assert request.speculation.draft_len == 3
    assert 0 < fake.remaining_s[0] <= 102  # grpc rounds up


def test_options_left_out_are_absent(client: Client, fake: FakeCoordinator) -> None:
    generation = client.generate(token_ids=[1, 2])
    generation.complete()
    request = fake.requests[0]
    assert list(request.token_ids.ids) == [1, 2]
    absent = ("max_tokens", "temperature", "top_p", "top_k", "speculation")
    assert not any(request.HasField(name) for name in absent)
    assert request.previous_session_id == ""
    assert request.session_id == generation.session_id != ""


@pytest.mark.parametrize(
    ("speculation", "mode"),
    [
        (True, types_pb2.SPECULATION_MODE_ON),
        (False, types_pb2.SPECULATION_MODE_OFF),
        (0, types_pb2.SPECULATION_MODE_OFF),
    ],
)
def test_speculation_switch(
    client: Client, fake: FakeCoordinator, speculation: bool | int, mode: int
) -> None:
    client.complete("Hi", speculation=speculation, stop="end")
    assert fake.requests[0].speculation.mode == mode
    assert fake.requests[0].speculation.draft_len == 0
    assert list(fake.requests[0].stop) == ["end"]


def test_a_draft_length_in_words(client: Client, fake: FakeCoordinator) -> None:
    client.complete("Hi", speculation="auto")
    client.complete("Hi", speculation="fixed:5")
    auto, fixed = (request.speculation for request in fake.requests)
    assert auto.mode == fixed.mode == types_pb2.SPECULATION_MODE_ON
    assert (auto.auto_draft_len, auto.draft_len) == (True, 0)
    assert (fixed.auto_draft_len, fixed.draft_len) == (False, 5)
    with pytest.raises(InvalidRequestError, match="fixed:N"):
        client.complete("Hi", speculation="often")


def test_wrong_arguments_are_refused_before_any_call(client: Client, fake: FakeCoordinator) -> None:
    with pytest.raises(InvalidRequestError, match="exactly one"):
        client.generate()
    with pytest.raises(InvalidRequestError, match="exactly one"):
        client.generate("Hi", token_ids=[1])
    with pytest.raises(InvalidRequestError, match="bad argument"):
        client.generate("Hi", max_tokens=-1)
    with pytest.raises(InvalidRequestError, match="bad argument"):
        client.generate("Hi", seed=2**64)
    with pytest.raises(InvalidRequestError, match="role"):
        client.generate(messages=[{"content": "Hi"}])
    with pytest.raises(InvalidRequestError, match="role"):
        client.generate(messages=[{"role": "user", "content": "Hi", "name": "x"}])
    with pytest.raises(TypeError, match="max_token"):
        client.generate("Hi", max_token=3)
    assert fake.requests == []


def endless() -> list[object]:
    return [started(), delta(0, (5, "Hel", PLAIN)), asyncio.Event()]


def test_leaving_the_loop_cancels_the_call() -> None:
    with serving_in_thread(endless()) as fake, Client(fake.address) as client:
        generation = client.generate("Hi")
        for chunk in generation:
            assert chunk.text == "Hel"
            break
        assert fake.cancelled.wait(DEADLINE_S)
        completion = generation.complete()
        assert completion.finish_reason is FinishReason.CANCELLED
        assert completion.text == "Hel"


def test_cancel_from_another_thread_ends_the_iteration() -> None:
    with serving_in_thread(endless()) as fake, Client(fake.address) as client:
        with client.generate("Hi") as generation:
            seen: list[str] = []
            for chunk in generation:
                seen.append(chunk.text)
                threading.Thread(target=generation.cancel).start()
        assert seen == ["Hel"]
        assert fake.cancelled.wait(DEADLINE_S)


def test_end_of_the_with_block_cancels_the_call() -> None:
    with serving_in_thread(endless()) as fake, Client(fake.address) as client:
        with client.generate("Hi") as generation:
            next(iter(generation))
        assert fake.cancelled.wait(DEADLINE_S)


def test_server_error_arrives_as_itself_after_what_came_before() -> None:
    script = [started(), delta(0, (5, "Hel", PLAIN)), OverloadedError("full, try later")]
    with serving_in_thread(script) as fake, Client(fake.address) as client:
        generation = client.generate("Hi")
        seen = []
        with pytest.raises(OverloadedError, match="full, try later"):
            seen.extend(chunk.text for chunk in generation)
        with pytest.raises(OverloadedError):
            generation.complete()


def test_a_gap_in_the_stream_is_an_error() -> None:
    script = [started(), delta(0, (5, "a", PLAIN)), delta(2, (6, "b", PLAIN)), finished(2)]
    with (
        serving_in_thread(script) as fake,
        Client(fake.address) as client,
        pytest.raises(InternalError, match="expected them at 1"),
    ):
        client.complete("Hi")


def test_a_stream_without_an_end_is_an_error() -> None:
    script = [started(), delta(0, (5, "a", PLAIN))]
    with (
        serving_in_thread(script) as fake,
        Client(fake.address) as client,
        pytest.raises(InternalError, match="ended too early"),
    ):
        client.complete("Hi")


def test_deadline() -> None:
    with (
        serving_in_thread(endless()) as fake,
        Client(fake.address) as client,
        pytest.raises(DeadlineError),
    ):
        client.complete("Hi", timeout_s=0.5)


def test_nothing_listening_names_the_address_and_what_to_start() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with Client(address, retry=AT_ONCE) as client:
            with pytest.raises(UnavailableError, match=rf"{address}.*outrider up"):
                client.complete("Hi")
            with pytest.raises(UnavailableError, match=rf"{address}.*outrider up"):
                client.status()


def test_threads_that_call_first_at_once_share_one_channel(
    fake: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[grpc.Channel] = []
    begin, second_came = threading.Barrier(2), threading.Event()
    connect = grpc.insecure_channel

    def slow(*arguments: Any, **options: Any) -> grpc.Channel:
        if made:
            second_came.set()
        made.append(connect(*arguments, **options))
        # As long as it takes the other thread to come here, if nothing holds it back.
        second_came.wait(0.5)
        return made[-1]

    monkeypatch.setattr(grpc, "insecure_channel", slow)

    def call(client: Client) -> int:
        begin.wait()
        return client.list_models()[0].context_len

    with Client(fake.address) as client, ThreadPoolExecutor(2) as threads:
        assert list(threads.map(call, [client, client])) == [64, 64]
    assert len(made) == 1


def test_close_without_a_call_and_twice(fake: FakeCoordinator) -> None:
    client = Client(fake.address)
    client.close()
    with Client(fake.address) as used:
        used.list_models()
        used.close()


def test_address_without_port_is_refused() -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        Client("localhost").status()


def test_short_calls(client: Client, fake: FakeCoordinator) -> None:
    assert client.cancel("running") is True
    assert client.cancel("over") is False
    session = client.get_session("known")
    assert (session.state, session.finish_reason) == ("finished", FinishReason.LENGTH)
    assert session.token_ids == (5, 6)
    with pytest.raises(UnknownSessionError, match="no session other"):
        client.get_session("other")
    assert client.list_models()[0].context_len == 64
    worker = pb.WorkerInfo(pool=pb.WORKER_POOL_VERIFY, worker_id="v", connected=True)
    fake.status = pb.GetStatusResponse(workers=[worker], running_sessions=2, redis_reachable=True)
    status = client.status()
    assert (status.workers[0].pool, status.workers[0].connected) == ("verify", True)
    assert (status.running_sessions, status.redis_reachable) == (2, True)
