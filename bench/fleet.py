"""Sixteen sessions over two of each worker, while one draft worker dies and one joins."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from bench.prompts import encode, load_prompts
from bench.report import Bar, Report, progress
from bench.workers import Holdings, holdings, running_records
from outrider.cli.models import resolve_model
from outrider.client import AsyncClient
from outrider.config import CACHE, setting
from outrider.local.commands import StackSettings
from outrider.local.stack import LocalStack
from outrider.messages import FinishReason
from outrider.model.embedded import EMBEDDED_MODEL
from outrider.model.tokenizers import load_tokenizer


@dataclass(frozen=True, slots=True)
class Settings:
    """How many sessions, and what they ask for."""

    model: str = setting(EMBEDDED_MODEL, help="The target: a path, or this name.")
    drafter: str = setting("ngram", choices=("ngram", "model"), help="model: the target itself.")
    prompts: str | None = setting(None, help="File of JSON lines with category and turns.")
    sessions: int = setting(16, at_least=2, help="Sessions at once.")
    prompt_tokens: int = setting(512, at_least=1, help="Longest prompt, in tokens.")
    new_tokens: int = setting(64, at_least=8, help="Tokens to generate.")
    temperature: float = setting(0.8, at_least=0, help="Temperature; session n has seed n.")
    cache: str = setting(CACHE, help="Directory for the embedded model.")
    bar: bool = setting(False, help="Exit with 1 when a session differs or something is left.")


class Load:
    """The sessions and how many tokens they have said so far."""

    def __init__(self, settings: Settings, prompts: Sequence[Sequence[int]]) -> None:
        self._settings = settings
        self.prompts = prompts
        self.tokens = 0
        self._grown = asyncio.Condition()

    async def one(
        self, client: AsyncClient, number: int, *, speculation: bool
    ) -> tuple[tuple[int, ...], FinishReason]:
        """Session `number` from start to end."""
        settings = self._settings
        generation = client.generate(
            token_ids=self.prompts[number % len(self.prompts)],
            max_tokens=settings.new_tokens,
            temperature=settings.temperature,
            seed=number,
            speculation=speculation,
        )
        async for chunk in generation:
            async with self._grown:
                self.tokens += len(chunk.pieces)
                self._grown.notify_all()
        completion = await generation.complete()
        return completion.token_ids, completion.finish_reason

    async def until(self, tokens: int) -> None:
        """Wait until the sessions have said that many tokens together."""
        async with self._grown:
            await self._grown.wait_for(lambda: self.tokens >= tokens)


async def churn(stack: LocalStack, load: Load, expected_tokens: int) -> None:
    """Kill a draft worker after a quarter of the tokens, add one after half."""
    await load.until(expected_tokens // 4)
    await stack.kill("draft-1")
    progress("draft-1 killed")
    await load.until(expected_tokens // 2)
    progress(f"{await stack.add_draft_worker()} joined")


async def measure(settings: Settings, model: str, load: Load) -> Report:
    """The whole run."""
    stack_settings = StackSettings(
        model=model,
        drafter=settings.drafter,
        draft_model=model if settings.drafter == "model" else "",
        draft_workers=2,
        verify_workers=2,
    )
    report = Report("Fleet", ["what", "value"])
    numbers = range(settings.sessions)
    async with (
        LocalStack(stack_settings, report=progress) as stack,
        AsyncClient(stack.address) as client,
    ):
        before = await holdings(client)
        solo = [await load.one(client, number, speculation=False) for number in numbers]
        progress("solo runs done")
        load.tokens = 0
        expected_tokens = sum(len(ids) for ids, _ in solo)
        together, _ = await asyncio.gather(
            asyncio.gather(*(load.one(client, n, speculation=True) for n in numbers)),
            churn(stack, load, expected_tokens),
        )
        after = await _settled(client)
        running = await running_records(stack.redis_url)
        status = await client.status()
    equal = sum(one == other for one, other in zip(together, solo, strict=True))
    finished = sum(reason in (FinishReason.STOP, FinishReason.LENGTH) for _, reason in together)
    report.rows += [
        ["sessions", settings.sessions],
        ["finished", finished],
        ["equal to their solo run", equal],
        ["acceptance rate", f"{status.speculation.acceptance_rate:.3f}"],
        ["verified draft tokens", status.speculation.draft_tokens],
        *(
            [
                f"{h.worker_id}: free of {h.total_blocks} blocks, sessions",
                f"{h.free_blocks}, {h.sessions}",
            ]
            for h in after
        ),
        ["running records in Redis", len(running)],
    ]
    report.figures = {"sessions": settings.sessions, "finished": finished, "equal": equal}
    idle = all(h.idle for h in after) and all(h.idle for h in before)
    report.bars = [
        Bar("every session finishes", finished == settings.sessions),
        Bar("every session equals its solo run", equal == settings.sessions),
        Bar("free blocks are back at the start on every worker", idle),
        Bar("no record says running", not running, ", ".join(running)),
        Bar("drafts were verified", status.speculation.draft_tokens > 0),
    ]
    return report


async def _settled(client: AsyncClient) -> list[Holdings]:
    """What the workers hold once the last close has reached them; at most five seconds later."""
    for _ in range(50):
        held = await holdings(client)
        if all(worker.idle for worker in held):
            break
        await asyncio.sleep(0.1)
    return held


def run(settings: Settings) -> None:
    """Run sessions over two of each worker while a draft worker dies and another joins."""
    model = resolve_model(settings.model, settings.cache)
    tokenizer = load_tokenizer(model)
    texts = load_prompts(settings.prompts, settings.sessions)
    prompts = [encode(tokenizer, text.text, settings.prompt_tokens) for text in texts]
    report = asyncio.run(measure(settings, model, Load(settings, prompts)))
    report.print()
    report.exit(enforce=settings.bar)
