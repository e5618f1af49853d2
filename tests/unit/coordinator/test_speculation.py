"""Whether and how a session speculates, by request, policy and trust."""

from collections.abc import AsyncIterator

import pytest

from coordinator.speculation import CurrentPolicy, resolve_speculation
from outrider.errors import ConfigError
from outrider.messages import AcceptanceRule, SpeculationOptions
from outrider.pb.v1 import types_pb2
from outrider.session.policy import POLICY_KEY, Policy, PolicyStore
from outrider.session.redis import Redis, connect
from tests.support.valkey import new_valkey

COUPLED, REJECTION = AcceptanceRule.COUPLED, AcceptanceRule.REJECTION
ON, OFF = types_pb2.SPECULATION_MODE_ON, types_pb2.SPECULATION_MODE_OFF
ASKS_REJECTION = types_pb2.ACCEPTANCE_RULE_REJECTION
ASKS_COUPLED = types_pb2.ACCEPTANCE_RULE_COUPLED


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize(
    ("asked", "policy", "expected"),
    [
        ({}, Policy(), SpeculationOptions(True, 0, COUPLED)),
        ({}, Policy(speculation=False), SpeculationOptions(False, 0, COUPLED)),
        ({"mode": ON}, Policy(speculation=False), SpeculationOptions(True, 0, COUPLED)),
        ({"mode": OFF, "draft_len": 3}, Policy(), SpeculationOptions(False, 3, COUPLED)),
        ({"rule": ASKS_COUPLED}, Policy(rule=REJECTION), SpeculationOptions(True, 0, COUPLED)),
        ({}, Policy(k="fixed:3"), SpeculationOptions(True, 3, COUPLED)),
        ({}, Policy(k="auto"), SpeculationOptions(True, 0, COUPLED, auto_draft_len=True)),
        ({"draft_len": 2}, Policy(k="auto"), SpeculationOptions(True, 2, COUPLED)),
        (
            {"auto_draft_len": True},
            Policy(k="fixed:3"),
            SpeculationOptions(True, 0, COUPLED, auto_draft_len=True),
        ),
        # Without drafts there is nothing to be inexact about.
        ({"mode": OFF, "rule": ASKS_REJECTION}, Policy(), SpeculationOptions(False, 0, REJECTION)),
    ],
)
def test_request_first_then_policy(
    asked: dict[str, int], policy: Policy, expected: SpeculationOptions, trusted: bool
) -> None:
    options = types_pb2.SpeculationOptions(**asked)
    assert resolve_speculation(options, policy, trusted_drafts=trusted) == expected


def test_rejection_needs_trust() -> None:
    asked = types_pb2.SpeculationOptions(rule=ASKS_REJECTION)
    found = resolve_speculation(asked, Policy(), trusted_drafts=True)
    assert found == SpeculationOptions(True, 0, REJECTION)
    with pytest.raises(ConfigError, match=r"only exact with.*--trust-draft-worker.*coupled"):
        resolve_speculation(asked, Policy(), trusted_drafts=False)


def test_rejection_by_policy_falls_back_to_coupled() -> None:
    open_, policy = types_pb2.SpeculationOptions(), Policy(rule=REJECTION)
    assert resolve_speculation(open_, policy, trusted_drafts=True).rule is REJECTION
    assert resolve_speculation(open_, policy, trusted_drafts=False).rule is COUPLED


@pytest.fixture
async def redis() -> AsyncIterator[Redis]:
    with new_valkey() as server:
        async with connect(server.connection_url) as redis:
            yield redis


async def test_current_policy_follows_redis(redis: Redis) -> None:
    store = PolicyStore(redis)
    current = CurrentPolicy(store)
    await current.refresh()
    assert current.value == Policy()
    assert await store.read() is None
    await store.change(rule=REJECTION, speculation=False)
    await current.refresh()
    assert current.value == Policy(1, REJECTION, speculation=False)
    # One that means nothing changes nothing.
    await redis.command("HSET", POLICY_KEY, "rule", "magic")
    await current.refresh()
    assert current.value == Policy(1, REJECTION, speculation=False)
    # A Redis that came back empty is told again.
    await redis.command("FLUSHALL")
    await current.refresh()
    assert current.value == await store.read() == Policy(1, REJECTION, speculation=False)
