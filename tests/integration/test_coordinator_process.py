"""`python -m coordinator` as a process: health, a bad start, and SIGTERM."""

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from transformers import PreTrainedTokenizerFast

from outrider import rpc
from outrider.local.ports import take_port
from outrider.messages import FinishReason
from outrider.model.describe import describe
from outrider.pb.v1 import coordinator_pb2 as pb
from outrider.pb.v1 import coordinator_pb2_grpc
from tests.support.coordinator_stack import (
    EOS,
    MODEL,
    Completion,
    Stack,
    running_stack,
    until_async,
)

SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_stack() as stack:
        yield stack


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    config = {"model_type": "llama", "max_position_embeddings": 64, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": EOS}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=MODEL.tokenizer.backend)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


@asynccontextmanager
async def process(*args: str) -> AsyncIterator[asyncio.subprocess.Process]:
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "coordinator", *args, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield running
    finally:
        if running.returncode is None:
            running.kill()
        await running.communicate()


async def health(channel: grpc.aio.Channel) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=5)
    except grpc.RpcError:
        return -1
    return int(reply.status)


async def test_serves_and_leaves_in_order(stack: Stack, model_path: Path) -> None:
    port = take_port("127.0.0.1", 0)
    args = ["--model", str(model_path), "--redis-url", stack.valkey.connection_url]
    args += ["--port", str(port), "--served-name", "tiny", "--worker-id", "c1"]
    # Tokenizer and config are enough: the first worker says which weights are served.
    assert describe(str(model_path)).fingerprint == ""
    worker = await stack.add_verify("v1", model_fingerprint="its-weights")
    async with process(*args) as running, rpc.open_channel(f"127.0.0.1:{port}") as channel:

        async def serving() -> bool:
            return await health(channel) == SERVING

        await until_async(serving, "it serves")
        client = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        first, second = (
            Completion(client.Generate(pb.GenerateRequest(session_id=sid, model="tiny", text="a")))
            for sid in ("first", "second")
        )
        starts = [await worker.started("first"), await worker.started("second")]
        worker.say(*(worker.progress(start, "é") for start in starts))
        await first.shows("é")
        running.send_signal(signal.SIGTERM)

        async def leaving() -> bool:
            return await health(channel) != SERVING

        await until_async(leaving, "it says that it leaves")
        assert running.returncode is None
        # What runs may finish; and a client that goes does not keep the process.
        worker.say(worker.progress(starts[0], [EOS], base_len=3))
        await first.end()
        await second.cancel()
        assert await asyncio.wait_for(running.wait(), 30) == 0
    # The one whose client went is paused, and could be resumed elsewhere.
    for sid, reason in (("first", FinishReason.STOP), ("second", None)):
        record, _ = await stack.records.read(sid)
        assert (record.owner, record.finish_reason) == ("c1", reason)


async def test_a_bad_start_says_what_to_do(stack: Stack, model_path: Path) -> None:
    url = stack.valkey.connection_url
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for args, said in (
            (["--model", str(model_path / "none"), "--redis-url", url], "no model at"),
            (["--model", str(model_path), "--redis-url", "http://x"], "--redis-url 'http://x'"),
            (["--model", str(model_path), "--redis-url", url, "--port", port], "--port"),
        ):
            async with process(*args) as running:
                _, stderr = await running.communicate()
                assert running.returncode == 1
                assert said in stderr.decode()
                assert "Traceback" not in stderr.decode()
