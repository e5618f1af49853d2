"""Every drafter leaves the text as it is, in this process and through real services."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.inprocess import DRAFTER, FOREVER_S, Answer, InProcess
from outrider.client import AsyncClient, Completion
from outrider.drafting.base import Drafter
from outrider.drafting.draft_model import PlainDraftModel
from outrider.drafting.hybrid import HybridDrafter
from outrider.drafting.model import ModelDrafter
from outrider.drafting.suffix import SuffixDrafter
from outrider.local.commands import StackSettings
from outrider.local.stack import LocalStack
from outrider.messages import Endings, SamplingParams, SpeculationOptions, StartSession
from outrider.model.early_exit import first_layers
from outrider.model.loading import load_model
from outrider.model.paged import PagedModel
from tests.support.models import CONTEXT, EOS, TOKENS, perturbed, save_model
from verify_worker.scheduler import Limits

NEW_TOKENS = 40
# Some repeat themselves, some do not.
PROMPTS = [
    [number, number + 1, number + 2] * 5
    if number % 2
    else [(7 * number + t * t) % TOKENS for t in range(11)]
    for number in range(6)
]
# Drafts are waited for: on a tiny target none is worth it.
PATIENT = ("--draft-wait-s", "60")

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def drafter(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return perturbed(target, tmp_path_factory.mktemp("drafter"), noise=0.05)


def model_drafter(path: Path, layers: int = 0) -> ModelDrafter:
    model = load_model(str(path))
    if layers:
        model = first_layers(model, layers)
    return ModelDrafter(PlainDraftModel(model, total_blocks=128, token_count=TOKENS))


MAKERS: dict[str, Callable[[Path, Path], Drafter]] = {
    "suffix": lambda target, drafter: SuffixDrafter(),
    "early exit": lambda target, drafter: model_drafter(target, 1),
    "hybrid": lambda target, drafter: HybridDrafter(SuffixDrafter(), model_drafter(drafter)),
}


def said(target: Path, drafter: Drafter, temperature: float, draft_len: int) -> list[Answer]:
    """What the sessions say, in two waves, of which the second may know the first."""
    limits = Limits(context_len=CONTEXT, vocab_size=TOKENS, draft_wait_s=FOREVER_S, corpus="target")
    both = InProcess(PagedModel(load_model(str(target)), 128), drafter, TOKENS, limits)
    answers = []
    for wave in range(2):
        starts = [
            StartSession(
                session_id=f"{wave}/{number}",
                epoch=1,
                token_ids=tuple(prompt),
                prompt_len=len(prompt),
                sampling=SamplingParams(temperature, seed=number),
                endings=Endings(NEW_TOKENS, frozenset({EOS})),
                speculation=SpeculationOptions(enabled=draft_len > 0, draft_len=draft_len),
                drafter=DRAFTER,
            )
            for number, prompt in enumerate(PROMPTS)
        ]
        answers += both.run(starts)
    assert both.scheduler.pool.free == both.scheduler.pool.total
    return answers


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", MAKERS)
def test_the_text_is_that_without_drafts(
    target: Path, drafter: Path, name: str, temperature: float
) -> None:
    plain = said(target, SuffixDrafter(), temperature, 0)
    drafted = said(target, MAKERS[name](target, drafter), temperature, 4)
    assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in plain]
    assert sum(answer.figures.draft_tokens for answer in plain) == 0
    assert sum(answer.figures.accepted_tokens for answer in drafted) > 0


def stack_of(**settings: Any) -> LocalStack:
    return LocalStack(StackSettings(threads=1, verify_flags=PATIENT, **settings))


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[AsyncClient]:
    async with stack_of(**settings) as stack, AsyncClient(stack.address) as client:
        yield client


async def complete(client: AsyncClient, **options: Any) -> Completion:
    return await client.complete(
        token_ids=PROMPTS[2], max_tokens=NEW_TOKENS, temperature=0.8, seed=7, **options
    )


async def test_through_services_a_session_is_drafted_from_what_an_earlier_one_said(
    target: Path,
) -> None:
    async with running(model=str(target), drafter="suffix") as client:
        plain = await complete(client, speculation=False)
        (worker,) = [w for w in (await client.status()).workers if w.pool == "draft"]
        assert worker.model == "suffix"
        first = await complete(client, speculation=4)
        second = await complete(client, speculation=4)
        assert first.token_ids == second.token_ids == plain.token_ids
        # The text does not repeat itself, but the second session repeats the first.
        assert second.speculation.accepted_tokens > 3 * first.speculation.accepted_tokens
        assert second.speculation.accepted_tokens > NEW_TOKENS // 2


async def test_through_services_a_tenant_is_drafted_from_its_own_outputs_only(
    target: Path,
) -> None:
    accepted: dict[str, list[int]] = {}
    async with stack_of(model=str(target), drafter="suffix") as stack:
        for tenant in ("x", "y", "", "x", ""):
            async with AsyncClient(stack.address, tenant=tenant) as client:
                completion = await complete(client, speculation=4)
            accepted.setdefault(tenant, []).append(completion.speculation.accepted_tokens)
    # Whoever comes first has only the session's own text, whatever was said to others.
    for once in (accepted["x"][0], accepted["y"][0], accepted[""][0]):
        assert once < NEW_TOKENS // 4
    for again in (accepted["x"][1], accepted[""][1]):
        assert again > NEW_TOKENS // 2


@pytest.mark.parametrize("name", ["early-exit", "hybrid"])
async def test_through_services_the_text_is_that_without_drafts(
    target: Path, drafter: Path, name: str
) -> None:
    extra = {"draft_model": str(drafter)} if name == "hybrid" else {}
    async with running(model=str(target), drafter=name, **extra) as client:
        plain = await complete(client, speculation=False)
        drafted = await complete(client, speculation=4)
        assert drafted.token_ids == plain.token_ids
        assert drafted.speculation.draft_tokens > 0
