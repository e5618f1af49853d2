"""Same tokens, whatever drafts: greedy against transformers, seeded against no speculation."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from bench.prompts import encode, load_prompts
from bench.reference import Reference, first_difference
from bench.report import Bar, Report, progress
from outrider.cli.models import resolve_model
from outrider.client import AsyncClient, Completion
from outrider.config import CACHE, setting
from outrider.draft_length import format_draft_length
from outrider.figures import SpeculationFigures
from outrider.local.commands import StackSettings
from outrider.local.stack import LocalStack
from outrider.model.embedded import EMBEDDED_MODEL
from outrider.model.tokenizers import load_tokenizer

# The target drafting for itself is slower than the target: here it is waited for all the same.
PATIENT = ("--draft-wait-s", "60")
KILL_AFTER_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Settings:
    """What to compare, and with what."""

    model: str = setting(EMBEDDED_MODEL, help="The target: a path, or this name.")
    prompts: str | None = setting(None, help="File of JSON lines with category and turns.")
    count: int = setting(20, at_least=1, help="Prompts.")
    prompt_tokens: int = setting(512, at_least=1, help="Longest prompt, in tokens.")
    new_tokens: int = setting(64, at_least=1, help="Tokens to generate.")
    temperature: float = setting(0.8, at_least=0, help="Of the seeded comparison.")
    seed: int = setting(7, at_least=0, help="Of the seeded comparison.")
    draft_len: int = setting(4, at_least=1, help="Draft length k.")
    cache: str = setting(CACHE, help="Directory for the embedded model.")
    bar: bool = setting(False, help="Exit with 1 when a token differs.")


Ids = list[tuple[int, ...]]


class Comparison:
    """Runs requests and collects where they differ from what they should say."""

    def __init__(self, settings: Settings, prompts: Sequence[Sequence[int]], reference: Reference):
        self.report = Report(
            "Parity", ["run", "requests", "equal", "acceptance", "accepted", "margins"]
        )
        self.prompts = prompts
        self.figures: dict[str, SpeculationFigures] = {}
        self._settings = settings
        self._reference = reference

    async def complete(
        self, client: AsyncClient, prompt: Sequence[int], *, seeded: bool, speculation: bool
    ) -> Completion:
        """One request."""
        settings = self._settings
        return await client.complete(
            token_ids=prompt,
            max_tokens=settings.new_tokens,
            temperature=settings.temperature if seeded else 0.0,
            seed=settings.seed,
            speculation=settings.draft_len if speculation else False,
        )

    async def one_by_one(
        self, client: AsyncClient, *, seeded: bool, speculation: bool
    ) -> list[Completion]:
        """Every prompt, one after the other."""
        return [
            await self.complete(client, prompt, seeded=seeded, speculation=speculation)
            for prompt in self.prompts
        ]

    async def at_once(self, client: AsyncClient, sessions: int) -> list[Completion]:
        """Every prompt, seeded, `sessions` at a time."""
        gate = asyncio.Semaphore(sessions)

        async def one(prompt: Sequence[int]) -> Completion:
            async with gate:
                return await self.complete(client, prompt, seeded=True, speculation=True)

        return list(await asyncio.gather(*map(one, self.prompts)))

    async def with_kills(self, stack: LocalStack, client: AsyncClient, name: str) -> Ids:
        """Every prompt, seeded; the draft worker is killed in the middle of each stream."""
        settings = self._settings
        said: Ids = []
        for prompt in self.prompts:
            worker = await stack.add_draft_worker()
            generation = client.generate(
                token_ids=prompt,
                max_tokens=settings.new_tokens,
                temperature=settings.temperature,
                seed=settings.seed,
                speculation=settings.draft_len,
            )
            tokens: list[int] = []
            killed = False
            async for chunk in generation:
                tokens.extend(chunk.token_ids)
                if not killed and len(tokens) >= KILL_AFTER_TOKENS:
                    await stack.kill(worker)
                    killed = True
            if not killed:
                await stack.kill(worker)
            said.append(tuple(tokens))
        progress(f"{name}: {len(said)} draft workers killed")
        return said

    def compare(self, name: str, said: Ids, expected: Ids, figures: SpeculationFigures) -> None:
        """One row of the table."""
        margins = []
        for prompt, left, right in zip(self.prompts, said, expected, strict=True):
            index = first_difference(left, right)
            if index is not None:
                margins.append(self._reference.margin([*prompt, *right[:index]]))
        equal = len(said) - len(margins)
        rate = f"{figures.acceptance_rate:.3f}" if figures.draft_tokens else "-"
        shown = ", ".join(f"{margin:.1e}" for margin in margins) or "-"
        self.report.rows.append([name, len(said), equal, rate, figures.accepted_tokens, shown])
        self.report.figures[name] = {
            "requests": len(said),
            "equal": equal,
            "acceptance_rate": figures.acceptance_rate,
            "draft_tokens": figures.draft_tokens,
            "accepted_tokens": figures.accepted_tokens,
            "mean_acceptance_length": figures.mean_acceptance_length,
            "margins": margins,
        }
        self.report.bars.append(Bar(f"{name}: equal", not margins))
        self.figures[name] = figures
        progress(f"{name}: {equal} of {len(said)} equal, acceptance {rate}")


def ids(completions: Sequence[Completion]) -> Ids:
    """The token ids of each."""
    return [completion.token_ids for completion in completions]


def total(completions: Sequence[Completion]) -> SpeculationFigures:
    """The figures of all together."""
    figures = SpeculationFigures()
    for completion in completions:
        figures.add(completion.speculation)
    return figures


async def compare_all(settings: Settings, model: str, comparison: Comparison, greedy: Ids) -> None:
    """All runs: two stacks, one with the ngram drafter and one with the target as its own."""
    nothing = SpeculationFigures()
    k = format_draft_length(settings.draft_len)
    lookup = StackSettings(model=model, drafter="ngram", k=k)
    async with LocalStack(lookup, report=progress) as stack, AsyncClient(stack.address) as client:
        plain = await comparison.one_by_one(client, seeded=False, speculation=False)
        comparison.compare("greedy, off, against transformers", ids(plain), greedy, nothing)
        said = await comparison.one_by_one(client, seeded=False, speculation=True)
        comparison.compare("greedy, ngram, against transformers", ids(said), greedy, total(said))
        expected = ids(await comparison.one_by_one(client, seeded=True, speculation=False))
        said = await comparison.one_by_one(client, seeded=True, speculation=True)
        comparison.compare("seeded, ngram, against off", ids(said), expected, total(said))
        said = await comparison.at_once(client, 8)
        comparison.compare("seeded, ngram, 8 at once", ids(said), expected, total(said))
        await stack.kill("draft-1")
        killed = await comparison.with_kills(stack, client, "ngram")
        comparison.compare("seeded, ngram, draft worker killed", killed, expected, nothing)
    own = StackSettings(
        model=model,
        drafter="model",
        draft_model=model,
        k=k,
        verify_flags=PATIENT,
    )
    async with LocalStack(own, report=progress) as stack, AsyncClient(stack.address) as client:
        said = await comparison.one_by_one(client, seeded=False, speculation=True)
        comparison.compare(
            "greedy, own model, against transformers", ids(said), greedy, total(said)
        )
        said = await comparison.one_by_one(client, seeded=True, speculation=True)
        comparison.compare("seeded, own model, against off", ids(said), expected, total(said))
        said = await comparison.at_once(client, 8)
        comparison.compare("seeded, own model, 8 at once", ids(said), expected, total(said))
        await stack.kill("draft-1")
        killed = await comparison.with_kills(stack, client, "own model")
        comparison.compare("seeded, own model, draft worker killed", killed, expected, nothing)


def run(settings: Settings) -> None:
    """Compare tokens with transformers and across drafters, batches and killed workers."""
    model = resolve_model(settings.model, settings.cache)
    tokenizer = load_tokenizer(model)
    texts = load_prompts(settings.prompts, settings.count)
    prompts = [encode(tokenizer, text.text, settings.prompt_tokens) for text in texts]
    progress(f"{len(prompts)} prompts of {len({text.category for text in texts})} categories")
    reference = Reference(model)
    greedy = [tuple(reference.greedy(prompt, settings.new_tokens)) for prompt in prompts]
    progress("transformers has spoken")
    comparison = Comparison(settings, prompts, reference)
    asyncio.run(compare_all(settings, model, comparison, greedy))
    report = comparison.report
    own = comparison.figures["greedy, own model, against transformers"]
    rate = own.acceptance_rate
    report.bars.append(Bar("own model: acceptance rate is 1.0", rate == 1.0, f"{rate:.4f}"))
    report.print()
    report.exit(enforce=settings.bar)
