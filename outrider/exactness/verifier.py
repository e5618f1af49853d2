"""Checks a deployed system against its own target model, on this machine.

plan     what to ask
prepare  what the target says to that under plain transformers, and the law of its tokens
examine  the same through a whole local stack, and what came of each comparison
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outrider.client import AsyncClient, Completion, GenerateOptions
from outrider.draft_length import format_draft_length
from outrider.errors import TokenizerMismatchError
from outrider.exactness.checks import Check, Ids, acceptance, distribution, parity
from outrider.exactness.law import Law, law_of, tempered
from outrider.exactness.margins import margin
from outrider.exactness.outcomes import draw_outcomes
from outrider.exactness.prompts import LAW_TEXT, encode, encode_plain
from outrider.exactness.reference import Reference, load_reference
from outrider.exactness.statistics import LEAST_EXPECTED
from outrider.figures import SpeculationFigures
from outrider.local.commands import Commands, StackSettings
from outrider.local.stack import LocalStack
from outrider.messages import AcceptanceRule, SamplingParams
from outrider.model.describe import describe
from outrider.model.pairs import check_models

# Requests at once, in the comparison of batches and in the distribution test.
BATCH = 8
SAMPLES_AT_ONCE = 64
# Below this a right system is not to be found in practice: one run in a thousand.
LEAST_P_VALUE = 0.001
NGRAM = "ngram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to check; `drafter` is a path, or "ngram".

    samples: completions of the distribution test; their first `law_tokens` tokens count.
    temperature, seed: of everything that is sampled.
    top_k: of the distribution test; 0 keeps every token.
    rules: each has a distribution test of its own.
    tie_margin: see `checks.parity`.
    """

    target: str
    drafter: str
    texts: Sequence[str]
    new_tokens: int
    samples: int
    law_tokens: int = 2
    temperature: float
    top_k: int = 0
    seed: int = 0
    rules: Sequence[AcceptanceRule] = (AcceptanceRule.COUPLED,)
    draft_len: int = 4
    threads: int = 0
    numerics: str = "fast"
    tie_margin: float = 1e-3


class Watcher(Protocol):
    """Is told how far the work is."""

    def begin(self, what: str, total: int) -> None:
        """Something of `total` steps begins; what was begun before has ended."""

    def advance(self, steps: int) -> None:
        """So many of them are done."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What the target says under plain transformers."""

    reference: Reference
    prompts: Sequence[tuple[int, ...]]
    greedy: Ids
    law_prompt: tuple[int, ...]
    law: Law
    stop_ids: frozenset[int]


def check_tokenizers(plan: Plan) -> Check:
    """Whether target and drafter mean the same by every id that can come out."""
    name = "tokenizer pair"
    if plan.drafter == NGRAM:
        return Check(name, True, "the ngram drafter proposes the session's own ids")
    try:
        pair = check_models(plan.target, plan.drafter)
    except TokenizerMismatchError as error:
        return Check(name, False, error.message)
    return Check(
        name, True, f"{pair.producible} ids mean the same to both", {"ids": pair.producible}
    )


def prepare(plan: Plan, watcher: Watcher) -> Expected:
    """Run the target under transformers in this process; takes seconds to minutes.

    Raises:
        ConfigError: the target can't be read.
    """
    watcher.begin("loading the target under transformers", 1)
    reference = load_reference(plan.target)
    tokenizer = reference.tokenizer
    prompts = [encode(tokenizer, text) for text in plan.texts]
    watcher.begin("transformers generates", len(prompts))
    greedy: list[tuple[int, ...]] = []
    for prompt in prompts:
        greedy.append(tuple(reference.greedy(prompt, plan.new_tokens)))
        watcher.advance(1)
    watcher.begin("the law of the first tokens", 1)
    stop_ids = describe(plan.target).stop_ids
    law_prompt = encode_plain(tokenizer, LAW_TEXT)
    law = law_of(
        reference,
        law_prompt,
        plan.law_tokens,
        tempered(plan.temperature, plan.top_k),
        least=LEAST_EXPECTED / plan.samples,
        stop_ids=stop_ids,
    )
    return Expected(reference, prompts, greedy, law_prompt, law, stop_ids)


async def examine(
    plan: Plan,
    expected: Expected,
    watcher: Watcher,
    found: Callable[[Check], None],
    commands: Callable[[StackSettings], Commands] = Commands,
) -> None:
    """Start the whole system, ask it, compare, and end it; `found` gets each check.

    Raises:
        UnavailableError: a part of it does not start; the message has its log.
    """
    settings = _stack_settings(plan)
    watcher.begin("starting the services", 1)
    stack = LocalStack(settings, commands=commands(settings))
    async with stack, AsyncClient(stack.address) as client:
        await _Examination(plan, expected, client, watcher, found).run()


def _stack_settings(plan: Plan) -> StackSettings:
    model = plan.drafter != NGRAM
    return StackSettings(
        model=plan.target,
        drafter="model" if model else NGRAM,
        draft_model=plan.drafter if model else "",
        k=format_draft_length(plan.draft_len),
        threads=plan.threads,
        log_level="warning",
        numerics=plan.numerics,
        trust_drafts=True,
        # A drafter may be slower than the target: here it is waited for all the same.
        verify_flags=("--draft-wait-s", "60", "--max-sessions", str(SAMPLES_AT_ONCE)),
        # Short matches too: wrong drafts are as welcome here as right ones.
        draft_flags=() if model else ("--ngram-min", "1"),
    )


@dataclass(slots=True)
class _Examination:
    plan: Plan
    expected: Expected
    client: AsyncClient
    watcher: Watcher
    found: Callable[[Check], None]
    figures: SpeculationFigures = field(default_factory=SpeculationFigures)

    async def run(self) -> None:
        """Every check, in order."""
        plan, expected = self.plan, self.expected
        numbers = range(len(expected.prompts))
        said = await self._ask("greedy, speculation off", numbers, speculate=False)
        await self._compare("greedy parity, speculation off", said, expected.greedy)
        said = await self._ask("greedy, speculation on", numbers)
        await self._compare("greedy parity, speculation on", said, expected.greedy)
        off = await self._ask("seeded, speculation off", numbers, seeded=True, speculate=False)
        said = await self._ask("seeded, speculation on", numbers, seeded=True)
        await self._compare("seeded parity, alone", said, off, seeded=True)
        together = [number % len(numbers) for number in range(max(BATCH, len(numbers)))]
        said = await self._ask(f"seeded, {BATCH} at once", together, seeded=True, at_once=BATCH)
        wanted = [off[number] for number in together]
        await self._compare(f"seeded parity, {BATCH} at once", said, wanted, seeded=True)
        for rule in plan.rules:
            await self._test_distribution(rule)
        self.found(acceptance(self.figures))

    async def _ask(
        self,
        what: str,
        numbers: Sequence[int],
        *,
        seeded: bool = False,
        speculate: bool = True,
        at_once: int = 1,
    ) -> list[tuple[int, ...]]:
        """The answers to the prompts of those numbers."""
        self.watcher.begin(what, len(numbers))
        gate = asyncio.Semaphore(at_once)

        async def one(number: int) -> Completion:
            options = GenerateOptions(
                token_ids=self.expected.prompts[number],
                max_tokens=self.plan.new_tokens,
                temperature=self.plan.temperature if seeded else 0.0,
                seed=self._seed(number),
                speculation=self.plan.draft_len if speculate else False,
                rule=AcceptanceRule.COUPLED.value,
            )
            async with gate:
                completion = await self.client.complete(**options)
            self.figures.add(completion.speculation if speculate else SpeculationFigures())
            self.watcher.advance(1)
            return completion

        return [c.token_ids for c in await asyncio.gather(*map(one, numbers))]

    async def _compare(self, name: str, said: Ids, expected: Ids, *, seeded: bool = False) -> None:
        prompts = self.expected.prompts

        def margin_at(answer: int, index: int) -> float:
            number = answer % len(prompts)
            sampling = SamplingParams(
                temperature=self.plan.temperature if seeded else 0.0, seed=self._seed(number)
            )
            before = expected[answer][:index]
            stop_ids = self.expected.stop_ids
            return margin(self.expected.reference, prompts[number], before, sampling, stop_ids)

        tie_margin = self.plan.tie_margin
        self.found(await asyncio.to_thread(parity, name, said, expected, margin_at, tie_margin))

    async def _test_distribution(self, rule: AcceptanceRule) -> None:
        plan = self.plan
        name = f"distribution, rule {rule.value}"
        self.watcher.begin(name, plan.samples)
        options = GenerateOptions(
            token_ids=self.expected.law_prompt,
            temperature=plan.temperature,
            top_k=plan.top_k,
            speculation=plan.draft_len,
            rule=rule.value,
        )
        drawn = await draw_outcomes(
            self.client,
            options,
            samples=plan.samples,
            tokens=plan.law_tokens,
            first_seed=plan.seed,
            at_once=SAMPLES_AT_ONCE,
            advance=self.watcher.advance,
        )
        self.figures.add(drawn.figures)
        self.found(distribution(name, drawn, self.expected.law, LEAST_P_VALUE))

    def _seed(self, number: int) -> int:
        return self.plan.seed + number
