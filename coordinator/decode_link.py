"""One Decode stream to one verify worker, for all the sessions that are on it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import grpc

from outrider import logs, rpc, wire
from outrider.clock import AwakeClock
from outrider.errors import InvalidRequestError
from outrider.messages import DecodeCommand, DecodeEvent
from outrider.pb.v1 import verify_pb2, verify_pb2_grpc
from outrider.session.registry import WorkerRecord
from outrider.tls import TlsFiles

# A frame holds all commands that wait, up to this size; far below the message limit.
FRAME_BYTES = 8 * 1024 * 1024
# How often silence is looked at, as a share of what is too long.
LOOKS = 10


@dataclass(frozen=True, slots=True)
class LinkLost:
    """Nothing more will come for the session over `link`."""

    link: "DecodeLink"
    why: str


DecodeCall: TypeAlias = (
    "grpc.aio.StreamStreamCall[verify_pb2.DecodeRequest, verify_pb2.DecodeResponse]"
)
Sink: TypeAlias = Callable[[DecodeEvent | LinkLost], None]


class DecodeLink:
    """The stream to one incarnation of a verify worker.

    `send` and `attach` never wait. When the stream ends, or the worker or its engine is silent
    for `silence_s`, every attached session is told once, and the link is of no further use.

    `connected` once the worker was heard and its engine works; `draining` as it last said; `why`
    the stream never came about, when it has ended.
    `on_change` is called when either changes.
    """

    def __init__(
        self,
        worker: WorkerRecord,
        on_change: Callable[[], None],
        silence_s: float = 5.0,
        tls: TlsFiles | None = None,
    ) -> None:
        self.worker = worker
        self._tls = tls
        self.connected = False
        self.draining = False
        self.why = ""
        self._silence_s = silence_s
        self._clock = AwakeClock(silence_s / LOOKS)
        self._heard_at = self._clock.seconds
        self._on_change = on_change
        self._log = logs.get(__name__).bind(worker_id=worker.worker_id, address=worker.address)
        self._sinks: dict[str, Sink] = {}
        self._outbox: list[DecodeCommand] = []
        self._waiting = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    @property
    def sessions(self) -> int:
        """Sessions of this coordinator on the worker."""
        return len(self._sinks)

    @property
    def closed(self) -> bool:
        """Whether the stream has ended, or never came about."""
        return self._task.done()

    @property
    def silent_s(self) -> float:
        """Seconds since the worker was heard, as far as this process was there to hear."""
        return self._clock.tick() - self._heard_at

    def attach(self, session_id: str, sink: Sink) -> None:
        """Give the session's events to `sink`."""
        self._sinks[session_id] = sink

    def detach(self, session_id: str) -> None:
        """Drop the session's events from now on."""
        self._sinks.pop(session_id, None)

    def send(self, command: DecodeCommand) -> None:
        """Send a command with the next frame; without a stream it is lost."""
        self._outbox.append(command)
        self._waiting.set()

    async def close(self) -> None:
        """End the stream."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        why = ""
        try:
            async with rpc.open_channel(self.worker.address, self._tls) as channel:
                stub = verify_pb2_grpc.VerifyServiceStub(channel)
                call = stub.Decode()  # type: ignore[call-arg]  # the hints want an iterator
                await call.wait_for_connection()
                why = await self._follow(call)
        except grpc.RpcError as error:
            why = rpc.error_of(error, self.worker.address).message
        except Exception:
            why = "a fault of the coordinator"
            self._log.exception("the link to a verify worker failed")
        finally:
            self._tell_lost(why)

    async def _follow(self, call: DecodeCall) -> str:
        """Carry commands and events until the stream is over, or of no use; says why."""
        # grpc would leave an iterator of frames running when the call breaks.
        writer = asyncio.create_task(self._write(call))
        ends = [asyncio.create_task(self._read(call)), asyncio.create_task(self._watch())]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in (writer, *ends):
                task.cancel()
            await asyncio.gather(writer, *ends, return_exceptions=True)

    def _tell_lost(self, why: str) -> None:
        if self.connected and why:
            self._log.warning("verify worker lost", why=why, sessions=self.sessions)
        else:
            self.why = why
        self.connected = False
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink(LinkLost(self, why or "the link was given up"))
        self._on_change()

    def _deliver(self, pb: verify_pb2.DecodeEvent) -> None:
        sink = self._sinks.get(pb.session_id)
        if sink is None:
            return  # the session has ended or moved
        try:
            sink(wire.decode_event_from_pb(pb))
        except InvalidRequestError as error:
            self._log.error("malformed event", session_id=pb.session_id, error=error.message)
            sink(LinkLost(self, f"it sent a malformed event: {error.message}"))

    async def _read(self, call: DecodeCall) -> str:
        """Deliver events until the stream ends, or the engine of the worker hangs."""
        while isinstance(frame := await call.read(), verify_pb2.DecodeResponse):
            self._heard_at = self._clock.tick()
            for event in frame.events:
                self._deliver(event)
            heartbeat = wire.heartbeat_from_pb(frame.heartbeat)
            hangs = heartbeat.silent_ms >= self._silence_s * 1000
            if hangs and self.connected:
                return f"its engine hangs: it is overdue by {heartbeat.silent_ms / 1000:.1f} s"
            # One that hangs from the beginning is given nothing until it does not.
            if (not hangs, heartbeat.draining) != (self.connected, self.draining):
                self._log.info("verify worker heard", works=not hangs, draining=heartbeat.draining)
                self.connected, self.draining = not hangs, heartbeat.draining
                self._on_change()
        return "the verify worker ended the stream"

    async def _watch(self) -> str:
        """Wait until the worker is silent for too long."""
        self._heard_at = self._clock.tick()
        while True:
            await asyncio.sleep(self._clock.tick_s)
            if self.silent_s >= self._silence_s:
                return f"it has said nothing for {self.silent_s:.1f} s"

    async def _write(self, call: DecodeCall) -> None:
        while True:
            await self._waiting.wait()
            self._waiting.clear()
            commands, self._outbox = self._outbox, []
            frame = verify_pb2.DecodeRequest()
            for command in commands:
                frame.commands.append(wire.decode_command_to_pb(command))
                if frame.ByteSize() > FRAME_BYTES:
                    await call.write(frame)
                    frame = verify_pb2.DecodeRequest()
            if frame.commands:
                await call.write(frame)
