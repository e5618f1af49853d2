"""The whole system as separate processes on tiny models: what a client gets in the end."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.workers import holdings, running_records
from outrider.client import AsyncClient, Completion
from outrider.figures import SpeculationFigures
from outrider.local.commands import StackSettings
from outrider.local.stack import LocalStack
from outrider.messages import FinishReason
from tests.support.collector import collector
from tests.support.models import perturbed, plain_greedy, save_model

PROMPTS = [[(7 * n + t * t) % 250 for t in range(5 + 9 * n)] for n in range(8)]
NEW_TOKENS = 48
# A draft of the target's own size is slower than the target: here it is waited for, where the
# request says how far to draft.
PATIENT = ("--draft-wait-s", "60")

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def drafter(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return perturbed(target, tmp_path_factory.mktemp("drafter"), noise=0.02)


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[tuple[LocalStack, AsyncClient]]:
    stack = LocalStack(StackSettings(threads=1, **settings))
    async with stack, AsyncClient(stack.address) as client:
        yield stack, client


async def complete(client: AsyncClient, prompt: Sequence[int], **options: Any) -> Completion:
    return await client.complete(
        **{"token_ids": prompt, "max_tokens": NEW_TOKENS, "temperature": 0.8, "seed": 7, **options}
    )


async def all_of(client: AsyncClient, **options: Any) -> list[tuple[int, ...]]:
    return [(await complete(client, prompt, **options)).token_ids for prompt in PROMPTS]


async def until(condition: Callable[[], Any], what: str) -> None:
    """Wait until the condition holds; it may be a coroutine function."""
    async with asyncio.timeout(30):
        while True:
            held = condition()
            if await held if asyncio.iscoroutine(held) else held:
                return
            await asyncio.sleep(0.02)
    raise AssertionError(what)


async def test_greedy_equals_transformers_whatever_drafts(target: Path) -> None:
    expected = [tuple(plain_greedy(target, prompt, NEW_TOKENS)) for prompt in PROMPTS]
    async with running(model=str(target)) as (_, client):
        assert await all_of(client, temperature=0.0, speculation=False) == expected
        assert await all_of(client, temperature=0.0, speculation=4) == expected
    own = {"drafter": "model", "draft_model": str(target), "verify_flags": PATIENT}
    async with running(model=str(target), **own) as (_, client):
        figures = SpeculationFigures()
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            completion = await complete(client, prompt, temperature=0.0, speculation=4)
            assert completion.token_ids == tokens
            figures.add(completion.speculation)
        # Case 1: the target drafts for itself and is always right.
        assert figures.acceptance_rate == 1.0
        assert figures.draft_tokens > 4 * len(PROMPTS)


async def test_seeded_tokens_do_not_depend_on_drafter_batch_or_a_killed_worker(
    target: Path, drafter: Path
) -> None:
    async with running(model=str(target)) as (stack, client):
        expected = await all_of(client, speculation=False)
        assert len(set(expected)) == len(PROMPTS)
        assert await all_of(client, speculation=True) == expected
    model = {"drafter": "model", "draft_model": str(drafter), "verify_flags": PATIENT}
    async with running(model=str(target), **model) as (stack, client):
        assert await all_of(client, speculation=4) == expected
        rate = (await client.status()).speculation.acceptance_rate
        assert 0.1 < rate < 1.0
        together = await asyncio.gather(
            *(complete(client, prompt, speculation=4) for prompt in PROMPTS)
        )
        assert [completion.token_ids for completion in together] == expected
        stream = client.generate(
            token_ids=PROMPTS[1], max_tokens=NEW_TOKENS, temperature=0.8, seed=7, speculation=4
        )
        seen = 0
        async for chunk in stream:
            seen += len(chunk.pieces)
            if seen >= 5 and stack.processes["draft-1"].running:
                await stack.kill("draft-1")
        completion = await stream.complete()
        assert completion.token_ids == expected[1]
        # The worker is gone, so the last rounds were plain.
        assert completion.pieces[-1].origin.value == "plain"
        name = await stack.add_draft_worker()
        again = await complete(client, PROMPTS[1], speculation=4)
        assert again.token_ids == expected[1]
        assert again.speculation.draft_tokens > 0
        assert name == "draft-2"


async def test_sixteen_sessions_while_draft_workers_come_and_go(target: Path) -> None:
    fleet = {"draft_workers": 2, "verify_workers": 2, "verify_flags": PATIENT}
    async with running(model=str(target), **fleet) as (stack, client):

        def one(number: int, speculation: bool | int) -> Any:
            prompt = PROMPTS[number % len(PROMPTS)]
            return complete(client, prompt, seed=number, speculation=speculation)

        solo = [(await one(number, False)).token_ids for number in range(16)]
        sessions = [asyncio.create_task(one(number, 4)) for number in range(16)]
        await asyncio.wait(sessions, return_when=asyncio.FIRST_COMPLETED)
        await stack.kill("draft-1")
        joining = asyncio.create_task(stack.add_draft_worker())
        completions = await asyncio.gather(*sessions)
        await joining
        assert [completion.token_ids for completion in completions] == solo
        reasons = {completion.finish_reason for completion in completions}
        assert reasons <= {FinishReason.STOP, FinishReason.LENGTH}

        async def idle() -> bool:
            held = await holdings(client)
            return len(held) == 4 and all(worker.idle for worker in held)

        await until(idle, "blocks or sessions are left on a worker")
        assert await running_records(stack.redis_url) == []


async def test_a_client_that_leaves_frees_everything(target: Path) -> None:
    async with running(model=str(target), drafter="ngram") as (stack, client):
        streams = [
            client.generate(token_ids=prompt, max_tokens=180, temperature=0.8, seed=1)
            for prompt in PROMPTS
        ]
        for stream in streams:
            async for _ in stream:
                break

        async def idle() -> bool:
            held = await holdings(client)
            return all(worker.idle for worker in held)

        await until(idle, "a session that nobody reads is still there")
        # The records follow the workers.
        for _ in range(200):
            if not await running_records(stack.redis_url):
                break
            await asyncio.sleep(0.02)
        assert await running_records(stack.redis_url) == []


async def test_generate_json_against_a_running_system(target: Path) -> None:
    async with running(model=str(target)) as (stack, _):
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "outrider", "generate", "abcabcabcabcabcabc"],
            *["--coordinator", stack.address, "--json", "--max-tokens", "12", "--seed", "3"],
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await process.communicate()
        assert process.returncode == 0
        answer = json.loads(out)
        assert len(answer["token_ids"]) == answer["usage"]["completion_tokens"] <= 12
        assert answer["finish_reason"] in ("stop", "length")
        assert set(answer["speculation"]) >= {
            "rounds",
            "draft_tokens",
            "accepted_tokens",
            "acceptance_rate",
            "mean_acceptance_length",
        }
        assert {"text", "timings"} <= set(answer)


async def test_case_36_one_trace_from_the_client_to_the_draft_worker(target: Path) -> None:
    async with collector() as (endpoint, spans):
        script = (
            "import sys; from outrider import Client, telemetry; "
            "end = telemetry.start('client', otlp_endpoint=sys.argv[2]); "
            "Client(sys.argv[1]).complete('abcabcabcabc', max_tokens=9); end()"
        )
        async with running(model=str(target), otlp_endpoint=endpoint) as (stack, _):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", script, stack.address, endpoint
            )
            assert await process.wait() == 0
        # Every service flushed its spans when it stopped.
        names = ["outrider.generate", "coordinator.generate", "verify.session", "draft.session"]
        assert {name: len(spans.trace_ids.get(name, ())) for name in names} == dict.fromkeys(
            names, 1
        )
        assert len({next(iter(spans.trace_ids[name])) for name in names}) == 1
