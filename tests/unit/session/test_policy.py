"""The policy in a real Valkey."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from outrider.errors import ConfigError
from outrider.messages import AcceptanceRule
from outrider.session.policy import POLICY_KEY, Policy, PolicyStore
from outrider.session.redis import Redis, connect
from tests.support.valkey import new_valkey


@pytest.fixture
async def redis() -> AsyncIterator[Redis]:
    with new_valkey() as server:
        async with connect(server.connection_url) as redis:
            yield redis


async def test_each_change_raises_the_version(redis: Redis) -> None:
    store = PolicyStore(redis)
    assert await store.read() is None
    await store.change(speculation=False)
    assert await store.read() == Policy(1, AcceptanceRule.COUPLED, speculation=False)
    await store.change(rule=AcceptanceRule.REJECTION)
    assert await store.read() == Policy(2, AcceptanceRule.REJECTION, speculation=False)
    await store.change(rule=AcceptanceRule.COUPLED, speculation=True)
    assert await store.read() == Policy(3)
    await store.change(k="fixed:3")
    assert await store.read() == Policy(4, k="fixed:3")
    await store.change(k="")
    assert await store.read() == Policy(5)


async def test_fields_of_other_names_are_left_alone(redis: Redis) -> None:
    store = PolicyStore(redis)
    await redis.command("HSET", POLICY_KEY, "canary_share", "0.1")
    assert await store.read() is None
    await store.change(speculation=True)
    assert await redis.command("HGET", POLICY_KEY, "canary_share") == b"0.1"
    assert await store.read() == Policy(1)


@pytest.mark.parametrize(
    ("field", "value"),
    [("rule", "magic"), ("speculation", "maybe"), ("version", "new"), ("k", "many")],
)
async def test_a_value_that_means_nothing_can_be_set_again(
    redis: Redis, field: str, value: str
) -> None:
    store = PolicyStore(redis)
    await redis.command("HSET", POLICY_KEY, field, value)
    with pytest.raises(ConfigError, match=f"{value}.*outrider policy"):
        await store.read()
    await store.change(rule=AcceptanceRule.REJECTION, speculation=False, k="auto")
    assert await store.read() == Policy(1, AcceptanceRule.REJECTION, speculation=False, k="auto")


async def test_a_lost_policy_is_restored_but_no_newer_one_overwritten(redis: Redis) -> None:
    store = PolicyStore(redis)
    lost = Policy(5, AcceptanceRule.REJECTION, speculation=False, k="fixed:2")
    await store.restore(lost)
    assert await store.read() == lost
    await store.change(speculation=True)
    await store.restore(lost)
    assert await store.read() == replace(lost, version=6, speculation=True)
