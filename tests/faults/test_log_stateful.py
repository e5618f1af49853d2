"""Exactly once: the epoch and length protocol of the token log on a real Valkey.

Two coordinators append, place again, renew their lease and take the session over from each
other, also when they are long out of date, while their messages are delayed, dropped, doubled and
reordered, and replies are lost. A client follows one of them at a time and resumes at its offset on
another.
Whatever happens, the log has no gap and no token twice, nothing in it ever changes, and the
client has exactly what the log has. A protocol that lacks one of its checks fails.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from outrider.session import record_scripts
from outrider.session.names import session_keys
from outrider.session.packing import unpack_tokens
from outrider.session.records import SessionRecords
from outrider.session.redis import Script
from tests.support.log_protocol import (
    MAKINGS,
    PROMPT,
    SID,
    Coordinator,
    Message,
    Program,
    Wire,
    new_record,
)
from tests.support.valkey import new_valkey

RUNS, RUNS_OF_A_MUTANT, RULES_OF_A_RUN = 100, 1000, 100
NAMES = ("c1", "c2")
LEAST_LEN = 4
MOST_MESSAGES = 6
RECORD, TOKENS, *_ = session_keys(SID)


class Machine(RuleBasedStateMachine):
    """The session, its coordinators, its client and the network between them and Valkey."""

    def __init__(self, valkey: "redis.Redis") -> None:
        super().__init__()
        valkey.flushall()
        self.valkey = valkey
        wire: Any = Wire(valkey)
        makings = itertools.count()
        self.coordinators = {name: Coordinator(name, wire, makings) for name in NAMES}
        self.programs: dict[str, Program] = {}
        self.network: list[Message] = []
        self.followed: str | None = None
        self.received: list[int] = []
        self.log: list[int] = []
        self.ended = False
        self._to_the_end("create", Program(SessionRecords(wire).create(new_record(), PROMPT)))

    def _run(self, name: str, program: Program) -> None:
        self.programs[name] = program
        self._went_on(name)

    def _went_on(self, name: str) -> None:
        """A program has sent its next message, or has ended."""
        program = self.programs[name]
        if program.waits_for is not None:
            self.network = [*self.network[-MOST_MESSAGES:], program.waits_for]
            return
        del self.programs[name]
        if program.failed and self.followed == name:
            self.followed = None  # the stream ends with an error
        self._stream()

    def _stream(self) -> None:
        """The client reads what the one that it follows has logged."""
        if self.followed is None or self.followed in self.programs:
            return
        known = self.coordinators[self.followed].completion
        self.received += known[len(self.received) :]

    def _deliver(self, message: Message, *, answered: bool) -> None:
        reply = message.execute()
        for name, program in list(self.programs.items()):
            if program.waits_for is message:
                if answered:
                    program.answer(reply)
                else:
                    program.no_answer()
                self._went_on(name)

    def _to_the_end(self, name: str, program: Program) -> bool:
        self._run(name, program)
        self._settle(name)
        return not program.failed

    def _settle(self, name: str) -> None:
        while name in self.programs:
            message = self.programs[name].waits_for
            assert message is not None
            if message in self.network:
                self.network.remove(message)
            self._deliver(message, answered=True)

    @property
    def idle_owners(self) -> list[str]:
        """Those that believe to own the session and have nothing under way."""
        return [
            name
            for name, coordinator in self.coordinators.items()
            if coordinator.owns and name not in self.programs
        ]

    @rule(data=st.data())
    def something_happens(self, data: Any) -> None:
        """One of what can happen now; a rule for each would leave most of them out of a run."""
        happens: list[tuple[int, Callable[[Any], None]]] = []
        if self.idle_owners:
            happens += [(6, self._tokens_are_made), (1, self._placed_again)]
            happens += [(2, self._lease_renewed)]
        if self.network:
            happens += [(6, self._delivered), (1, self._dropped)]
        if self.programs:
            happens += [(3, self._network_is_good_for_one), (3, self._timed_out)]
        if len(self.log) >= LEAST_LEN and not self.ended:
            happens += [(1, self._cancelled)]
        happens += [(2, self._client_resumes)]
        weighted = [what for weight, what in happens for _ in range(weight)]
        data.draw(st.sampled_from(weighted))(data.draw)

    def _client_resumes(self, draw: Any) -> None:
        name = self.followed = draw(st.sampled_from(NAMES))
        self._leave(name)
        self._run(name, Program(self.coordinators[name].take_over()))
        if draw(st.booleans()):
            self._settle(name)

    def _tokens_are_made(self, draw: Any) -> None:
        name = draw(st.sampled_from(self.idle_owners))
        self._run(name, Program(self.coordinators[name].append(draw(st.integers(1, 2)))))

    def _placed_again(self, draw: Any) -> None:
        name = draw(st.sampled_from(self.idle_owners))
        self._run(name, Program(self.coordinators[name].place_again()))

    def _lease_renewed(self, draw: Any) -> None:
        name = draw(st.sampled_from(self.idle_owners))
        self._run(name, Program(self.coordinators[name].renew()))

    def _delivered(self, draw: Any) -> None:
        """A message arrives, the oldest as well as the newest, and perhaps it will once more."""
        message = draw(st.sampled_from(self.network))
        if not draw(st.booleans()):
            self.network.remove(message)
        self._deliver(message, answered=draw(st.booleans()))

    def _dropped(self, draw: Any) -> None:
        self.network.remove(draw(st.sampled_from(self.network)))

    def _timed_out(self, draw: Any) -> None:
        """Nobody waits any more for a message that may still arrive and be carried out."""
        name = draw(st.sampled_from(sorted(self.programs)))
        self.programs[name].no_answer()
        self._went_on(name)

    def _network_is_good_for_one(self, draw: Any) -> None:
        self._settle(draw(st.sampled_from(sorted(self.programs))))

    def _cancelled(self, draw: Any) -> None:
        """By the client of one that may own the session, whatever it is doing."""
        name = draw(st.sampled_from(NAMES))
        if self.coordinators[name].owns:
            if (program := self.programs.pop(name, None)) is not None:
                program.close()
            self._to_the_end(name, Program(self.coordinators[name].finish()))

    @invariant()
    def exactly_once(self) -> None:
        before, self.log = self.log, self._read_log()
        assert self.log[: len(before)] == before, "what was in the log has changed"
        owner, epoch, state = self.valkey.hmget(RECORD, "owner", "epoch", "state")
        assert not self.ended or self.log == before, "the log went on after the end"
        assert not self.ended or state == b"finished", "it came back from its end"
        self.ended = state == b"finished"
        positions = [token // MAKINGS for token in self.log]
        assert positions == list(range(len(PROMPT), len(PROMPT) + len(self.log)))
        for name in self.idle_owners:
            known = self.coordinators[name].completion
            assert known == self.log[: len(known)], f"{name} takes for logged what is not"
            held = self.coordinators[name].journal.record.epoch
            if (name.encode(), b"%d" % held) == (owner, epoch):
                assert known == self.log, f"{name} does not know what it has to continue"
        assert self.received == self.log[: len(self.received)], "the client has something else"

    def teardown(self) -> None:
        """On a network that works the session comes to its end, and then nothing more happens."""
        for name in NAMES:
            self._leave(name)
        name = self.followed = NAMES[0]
        coordinator = self.coordinators[name]
        assert self._to_the_end(name, Program(coordinator.take_over()))
        if not self.ended:
            assert self._to_the_end(name, Program(coordinator.append(2)))
            assert self._to_the_end(name, Program(coordinator.finish()))
        self.exactly_once()
        assert self.ended
        assert self.received == self.log
        for message in self.network:  # the last ones arrive when all is over
            message.execute()
            self.exactly_once()

    def _leave(self, name: str) -> None:
        """The coordinator forgets all that it knows, as when it is killed."""
        if (program := self.programs.pop(name, None)) is not None:
            program.close()
        self.coordinators[name].journal = None

    def _read_log(self) -> list[int]:
        tokens = self.valkey.get(TOKENS)
        assert isinstance(tokens, bytes)
        return unpack_tokens(tokens)[len(PROMPT) :]


@pytest.fixture(scope="module")
def valkey() -> Iterator["redis.Redis"]:
    with new_valkey() as server:
        client = redis.Redis.from_url(server.connection_url)
        yield client
        client.close()


def check(valkey: "redis.Redis", runs: int) -> None:
    run_state_machine_as_test(
        lambda: Machine(valkey),
        settings=settings(
            max_examples=runs,
            stateful_step_count=RULES_OF_A_RUN,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_every_token_comes_exactly_once(valkey: "redis.Redis") -> None:
    check(valkey, RUNS)


# A script of `record_scripts`, a line in it, and what stands there instead.
MUTANTS = {
    "append at any epoch": ("APPEND", "if epoch ~= ARGV[2] then", "if false then"),
    "append at any length": ("APPEND", "if length ~= tonumber(ARGV[3]) then", "if false then"),
    "append after the end": ("APPEND", "if state == 'finished' then", "if false then"),
    "write at any epoch": ("UPDATE", "if epoch ~= ARGV[2] then", "if false then"),
    "write tokens at any length": (
        "UPDATE",
        "if length ~= tonumber(ARGV[6]) then",
        "if false then",
    ),
    "written to after the end": ("UPDATE", "if state == 'finished' then", "if false then"),
    "taken over at the same epoch": (
        "TAKE_OVER",
        "redis.call('HINCRBY', KEYS[1], 'epoch', 1)",
        "",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_script_without_a_check_fails(
    name: str, valkey: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    script, line, instead = MUTANTS[name]
    source = getattr(record_scripts, script).source
    assert source.count(line) == 1
    monkeypatch.setattr(record_scripts, script, Script(source.replace(line, instead)))
    with pytest.raises(AssertionError):
        check(valkey, RUNS_OF_A_MUTANT)
