"""Coordinators as short programs over a network that a test holds in its hands.

Records and journals are the real ones; their Redis is `Wire`: each script call becomes a
message that the test executes on a real Valkey when, as often and in the order it likes, or
never.
"""

from collections.abc import Coroutine, Generator, Iterator, Sequence
from typing import Any

import redis

from coordinator.journal import Journal
from outrider.errors import FencedError, RecordsUnavailableError, UnknownSessionError
from outrider.messages import FinishReason, SamplingParams, SpeculationOptions
from outrider.session.identity import ModelIdentity
from outrider.session.records import SessionRecord, SessionRecords
from outrider.session.redis import Script, ScriptCall, Value

SID, PROMPT = "s", [0, 1]
MAKINGS = 1024


def new_record() -> SessionRecord:
    return SessionRecord(
        session_id=SID,
        owner="",
        model="m",
        prompt_len=len(PROMPT),
        sampling=SamplingParams(),
        max_tokens=1000,
        stop=(),
        stop_ids=(),
        speculation=SpeculationOptions(),
        epoch=1,
    )


class Message:
    """A script call of one program, on its way to Valkey."""

    def __init__(self, valkey: "redis.Redis", call: ScriptCall) -> None:
        self._valkey = valkey
        self._call = call

    def __await__(self) -> Generator["Message", Any, Any]:
        return (yield self)

    def execute(self) -> Any:
        call = self._call
        return self._valkey.eval(call.script.source, len(call.keys), *call.keys, *call.args)


class Wire:
    """Stands for `outrider.session.redis.Redis`."""

    def __init__(self, valkey: "redis.Redis") -> None:
        self._valkey = valkey

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Value] = ()) -> Any:
        return await Message(self._valkey, ScriptCall(script, keys, args))


class Coordinator:
    """Owns the session, or believes so, by a real `Journal`; its programs run one at a time.

    A token says its position and the number of its making: who makes it again may well make
    another one, as under the rejection rule. It waits for its log before anything else, also
    where Redis does not answer.
    """

    def __init__(self, name: str, wire: Any, makings: Iterator[int]) -> None:
        self.name = name
        self.journal: Journal | None = None
        self._wire = wire
        self._records = SessionRecords(wire)
        self._makings = makings

    @property
    def owns(self) -> bool:
        """Whether it believes to own the session."""
        return self.journal is not None and self.journal.runs

    @property
    def completion(self) -> list[int]:
        """The tokens that it has; between two programs it takes all of them for logged."""
        return self.journal.token_ids[len(PROMPT) :] if self.journal else []

    async def take_over(self) -> None:
        """What `Resume` does."""
        self.journal = None
        stored = await self._records.take_over(SID, owner=self.name)
        self.journal = Journal.taken_over(self._records.calls, stored)

    async def place_again(self) -> None:
        """What the loss of a verify worker makes an owner do."""
        assert self.journal is not None
        self.journal.place(
            epoch=self.journal.record.epoch + 1,
            target=ModelIdentity("m", "float32", "fast"),
            verify_worker_id="v",
            draft_worker_id="",
        )
        await self._write()

    async def append(self, count: int) -> None:
        """Make tokens and log them."""
        assert self.journal is not None
        making = next(self._makings) % MAKINGS
        length = len(self.journal.token_ids)
        self.journal.extend([(length + n) * MAKINGS + making for n in range(count)])
        await self._write()

    async def renew(self) -> None:
        """Renew the lease."""
        await self._write(renew=True)

    async def finish(self) -> None:
        """End the session; a reply that was waited for never comes."""
        assert self.journal is not None
        self.journal.doubt()
        self.journal.finish(FinishReason.CANCELLED)
        await self._write()

    async def _write(self, *, renew: bool = False) -> None:
        journal = self.journal
        assert journal is not None
        while (call := journal.due(renew=renew)) is not None:
            renew = False
            try:
                reply = await self._wire.run(call.script, call.keys, call.args)
            except RecordsUnavailableError:
                journal.doubt()
            else:
                journal.answered(reply)
        if journal.lost is not None or journal.cancelled_elsewhere:
            self.journal = None
            raise journal.lost or FencedError("cancelled elsewhere")


class Program:
    """One running coroutine of a coordinator; `waits_for` is the message it stopped at."""

    def __init__(self, work: Coroutine[Message, Any, None]) -> None:
        self.waits_for: Message | None = None
        self.failed = False
        self._work = work
        self._go(lambda: work.send(None))

    def answer(self, reply: Any) -> None:
        self._go(lambda: self._work.send(reply))

    def no_answer(self) -> None:
        self._go(lambda: self._work.throw(RecordsUnavailableError("no answer")))

    def close(self) -> None:
        self._work.close()
        self.waits_for = None

    def _go(self, step: Any) -> None:
        try:
            self.waits_for = step()
        except StopIteration:
            self.waits_for = None
        except (FencedError, UnknownSessionError, RecordsUnavailableError):
            self.waits_for, self.failed = None, True
