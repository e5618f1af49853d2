"""The prefix cache in real processes on a tiny model: what is computed, and what is said."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from outrider import rpc
from outrider.client import AsyncClient, Completion
from outrider.local.commands import StackSettings
from outrider.local.stack import LocalStack
from outrider.model.describe import describe
from outrider.model.prefix import kv_fingerprint
from outrider.pb.v1 import verify_pb2, verify_pb2_grpc
from outrider.session.prefixes import PrefixDirectory, published_prefixes
from outrider.session.redis import connect
from tests.support.coordinator_stack import until_async
from tests.support.models import plain_greedy, save_model

PROMPT = [(t * t + 5) % 250 for t in range(200)]
OTHER = [(t * t + 9) % 241 for t in range(200)]
NEW_TOKENS = 12

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("target"))


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[tuple[LocalStack, AsyncClient]]:
    stack = LocalStack(StackSettings(**{"threads": 1, "drafter": "none", **settings}))
    async with stack, AsyncClient(stack.address) as client:
        yield stack, client


async def complete(client: AsyncClient, prompt: Sequence[int], **options: Any) -> Completion:
    values = {"token_ids": prompt, "max_tokens": NEW_TOKENS, "ignore_eos": True, **options}
    return await client.complete(**values)


async def state(client: AsyncClient) -> verify_pb2.GetWorkerStateResponse:
    """Of the only verify worker."""
    (address,) = [w.address for w in (await client.status()).workers if w.pool == "verify"]
    async with rpc.open_channel(address) as channel:
        stub = verify_pb2_grpc.VerifyServiceStub(channel)
        return await stub.GetWorkerState(verify_pb2.GetWorkerStateRequest())


async def test_a_second_session_computes_only_what_is_left(target: Path) -> None:
    async with running(model=str(target)) as (_, client):
        first = await complete(client, PROMPT)
        before = await state(client)
        assert before.rows == 200 + NEW_TOKENS - 1
        second = await complete(client, PROMPT)
        after = await state(client)
        assert after.rows - before.rows == 8 + NEW_TOKENS - 1
        assert (after.prefix_queries, after.prefix_hits) == (400, 192)
        assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 192)
        expected = tuple(plain_greedy(target, PROMPT, NEW_TOKENS))
        assert second.token_ids == first.token_ids == expected
        # The next turn goes on from the first one's prompt and answer.
        turn = [*PROMPT, *first.token_ids, *OTHER[:9]]
        third = await complete(client, turn)
        assert third.usage.cached_tokens == 208
        assert third.token_ids == tuple(plain_greedy(target, turn, NEW_TOKENS))
        idle = await state(client)
        assert idle.free_blocks == idle.total_blocks
        assert idle.cached_blocks >= 13


async def test_a_shared_prefix_with_drafts_seeds_and_sessions_at_once(target: Path) -> None:
    prompts = [[*PROMPT[: 40 + 20 * n], n, n + 1] for n in range(8)]

    async def all_of(client: AsyncClient, **options: Any) -> list[tuple[int, ...]]:
        sampling = {"temperature": 0.8, "seed": 3, "max_tokens": 30, **options}
        calls = [complete(client, prompt, **sampling) for prompt in prompts]
        return [completion.token_ids for completion in await asyncio.gather(*calls)]

    async with running(model=str(target), verify_flags=("--no-prefix-cache",)) as (_, client):
        solo = [
            (await complete(client, p, temperature=0.8, seed=3, max_tokens=30)).token_ids
            for p in prompts
        ]
        assert (await state(client)).prefix_queries == 0
    async with running(model=str(target), drafter="ngram") as (_, client):
        assert await all_of(client, speculation=4) == solo
        assert await all_of(client, speculation=False) == solo
        assert (await state(client)).prefix_hits > 0


async def test_an_evicted_prefix_is_computed_again(target: Path) -> None:
    # One session at a time: a pool of one context, 16 blocks.
    flags = ("--max-sessions", "1")
    async with running(model=str(target), verify_flags=flags) as (_, client):
        assert (await state(client)).total_blocks == 16
        first = await complete(client, PROMPT)
        await complete(client, OTHER)
        again = await complete(client, PROMPT)
        # The other one needed 14 of the 16 blocks; the beginning went last.
        assert again.usage.cached_tokens == 32
        assert again.token_ids == first.token_ids


async def test_the_coordinator_places_sessions_where_their_prefix_is(target: Path) -> None:
    async with running(model=str(target), verify_workers=2) as (stack, client):

        async def place(prompt: Sequence[int], new_tokens: int = NEW_TOKENS) -> str:
            completion = await complete(client, prompt, max_tokens=new_tokens)
            return (await client.get_session(completion.session_id)).verify_worker_id

        # Of two idle workers the first by name is taken, and then the other, while that is busy.
        for number in range(20):
            prompt = [number, *PROMPT[1:]]
            _, holder = await asyncio.gather(place(OTHER[:20], 200), place(prompt))
            if holder == "verify-2":
                break
        assert holder == "verify-2"
        kv = kv_fingerprint(describe(str(target)).fingerprint, "float32", "fast")
        prefixes = published_prefixes(kv, prompt)
        async with connect(stack.redis_url) as redis:
            directory = PrefixDirectory(redis)

            async def published() -> bool:
                holders = await directory.holders(prefixes)
                return [{h.worker_id for h in found} for found in holders] == [{holder}] * 3

            await until_async(published, "the prefix in Redis")

        async def both_idle() -> bool:
            return await place(OTHER[:20]) == "verify-1"

        await until_async(both_idle, "two workers that say that they are idle")
        assert [await place([*prompt, n]) for n in range(3)] == [holder] * 3
