"""`--numerics invariant` from end to end: the text depends on nothing that shares a step."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from outrider.client import AsyncClient, Completion
from outrider.local.commands import StackSettings
from outrider.local.stack import LocalStack
from tests.support.models import perturbed, save_model

PROMPTS = [[(7 * n + t * t) % 250 for t in range(5 + 9 * n)] for n in range(8)]
# With these and fast numerics six of the sixteen texts change when they are drafted for.
SEEDS = [0, 5]
REQUESTS = [(prompt, seed) for seed in SEEDS for prompt in PROMPTS]
NEW_TOKENS = 100
FLAGS = ("--dtype", "bfloat16", "--numerics", "invariant", "--draft-wait-s", "60")

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("target"), "qwen3", scale=10.0)


@pytest.fixture(scope="module")
def drafter(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return perturbed(target, tmp_path_factory.mktemp("drafter"), noise=0.02)


@asynccontextmanager
async def running(model: Path, **settings: Any) -> AsyncIterator[AsyncClient]:
    stack = LocalStack(StackSettings(model=str(model), verify_flags=FLAGS, **settings))
    async with stack, AsyncClient(stack.address) as client:
        yield client


async def complete(
    client: AsyncClient, prompt: Sequence[int], seed: int, speculation: Any
) -> Completion:
    return await client.complete(
        token_ids=prompt,
        max_tokens=NEW_TOKENS,
        temperature=1.0,
        seed=seed,
        speculation=speculation,
    )


async def all_at_once(client: AsyncClient, speculation: Any) -> list[tuple[int, ...]]:
    completions = await asyncio.gather(
        *(complete(client, prompt, seed, speculation) for prompt, seed in REQUESTS)
    )
    return [completion.token_ids for completion in completions]


async def test_text_is_the_same_alone_together_speculated_and_with_more_threads(
    target: Path, drafter: Path
) -> None:
    model = {"drafter": "model", "draft_model": str(drafter)}
    async with running(target, threads=1, **model) as client:
        alone = [(await complete(client, *request, False)).token_ids for request in REQUESTS]
        assert len(set(alone)) == len(REQUESTS)
        assert await all_at_once(client, False) == alone
        assert await all_at_once(client, 4) == alone
        figures = (await client.status()).speculation
        assert figures.accepted_tokens > 0
        assert figures.acceptance_rate < 1.0
    async with running(target, threads=2) as client:
        assert await all_at_once(client, 7) == alone
