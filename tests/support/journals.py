"""Journals of one session, and a real Valkey that carries out what they say."""

from collections.abc import Callable
from typing import Any, cast

import redis

from coordinator.journal import Journal
from outrider.messages import SamplingParams, SpeculationOptions, TokenLogprobs
from outrider.session.identity import ModelIdentity
from outrider.session.names import session_keys
from outrider.session.packing import unpack_logprobs, unpack_tokens
from outrider.session.record import SessionRecord, StoredSession, pairs, stored_from_hash
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
