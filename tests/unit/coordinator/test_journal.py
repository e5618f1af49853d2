"""Redis follows memory, whatever is lost on the way; a real Valkey carries the calls out."""

from collections.abc import Callable, Iterator
from typing import cast

import pytest
import redis

from coordinator.journal import Journal
from outrider.errors import FencedError, NumericsError, SessionExistsError
from outrider.messages import FinishReason, TokenLogprobs
from outrider.session import record_scripts
from outrider.session.names import session_keys
from outrider.session.record import Failure, SessionState
from tests.support.journals import CALLS, Server, extend, journal, place
from tests.support.valkey import new_valkey


@pytest.fixture(scope="module")
def valkey() -> Iterator["redis.Redis"]:
    with new_valkey() as server, redis.Redis.from_url(server.connection_url) as client:
        yield client


@pytest.fixture
def server(valkey: "redis.Redis") -> Server:
    valkey.flushall()
    return Server(valkey)


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


@pytest.mark.parametrize("logprobs", [[], [TokenLogprobs(-1.0)]])
def test_tokens_alone_are_a_short_write(server: Server, logprobs: list[TokenLogprobs]) -> None:
    ours = journal()
    server.write(ours)
    ours.extend([3], logprobs)
    ours.figures.add_round(2, 1)
    ours.cached_tokens = 1
    call = ours.due()
    assert call is not None
    assert call.script is record_scripts.APPEND
    ours.answered(server.run(call))
    server.check(ours)
    stored = server.read()
    assert stored is not None
    assert stored.cached_tokens == 1


def test_tokens_alone_run_on_a_session_that_was_taken_for_an_orphan(server: Server) -> None:
    ours = journal()
    server.write(ours)
    server.client.delete(session_keys("s")[3])
    server.run(CALLS.pause_orphan("s"))
    extend(ours, 3)
    assert server.write(ours) == 1
    server.check(ours)


@pytest.mark.parametrize("end", ["pause", "finish"])
def test_a_late_token_does_not_bring_a_session_back(server: Server, end: str) -> None:
    ours = journal()
    server.write(ours)
    if end == "pause":
        ours.pause()
    else:
        ours.finish(FinishReason.STOP)
    server.write(ours)
    extend(ours, 3)
    while not ours.lost and (call := ours.due()) is not None:
        ours.answered(server.run(call))
    stored = server.read()
    assert stored is not None
    assert stored.record.state is ours.record.state


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
