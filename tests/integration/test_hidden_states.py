"""A drafter that reads the target's hidden states, from one process to the other."""

import asyncio
import re
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench.inprocess import DRAFTER, FOREVER_S, Answer, InProcess
from outrider.client import AsyncClient
from outrider.drafting.base import Drafter, DraftRequest
from outrider.drafting.hybrid import HybridDrafter
from outrider.drafting.model import ModelDrafter
from outrider.drafting.suffix import SuffixDrafter
from outrider.drafting.trained import TrainedDraftModel
from outrider.local.commands import StackSettings
from outrider.local.ports import take_port
from outrider.local.stack import LocalStack
from outrider.messages import (
    AcceptanceRule,
    Draft,
    Endings,
    Price,
    SamplingParams,
    SpeculationOptions,
    StartSession,
    Tensor,
)
from outrider.model.compiled.draft_chains import DraftChains
from outrider.model.draft_network import load_draft_network
from outrider.model.loading import load_model
from outrider.model.numerics import FAST, choose_numerics
from outrider.model.paged import PagedModel
from tests.support.draft_networks import save_draft_network
from tests.support.models import CONTEXT, EOS, TOKENS, save_model
from verify_worker.scheduler import Limits

NEW_TOKENS = 24
# In the place of a draft length: chosen each round.
AUTO = -1
PROMPTS = [[(7 * n + t * t) % TOKENS for t in range(5 + 4 * n)] for n in range(4)]
COUPLED, REJECTION = AcceptanceRule.COUPLED, AcceptanceRule.REJECTION

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("targets") / "target")


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("drafts") / "draft"
    return save_draft_network(where, target, ids=range(0, TOKENS, 2))


def said(
    target: Path,
    drafter: Drafter,
    sampling: SamplingParams,
    draft_len: int,
    rule: AcceptanceRule = COUPLED,
) -> list[Answer]:
    limits = Limits(
        context_len=CONTEXT, vocab_size=TOKENS, draft_wait_s=FOREVER_S, layers=2, max_sessions=2
    )
    both = InProcess(PagedModel(load_model(str(target)), 64), drafter, TOKENS, limits)
    starts = [
        StartSession(
            session_id=str(number),
            epoch=1,
            token_ids=tuple(prompt),
            prompt_len=len(prompt),
            sampling=sampling,
            endings=Endings(NEW_TOKENS, frozenset({EOS})),
            speculation=SpeculationOptions(
                draft_len != 0, max(draft_len, 0), rule, auto_draft_len=draft_len == AUTO
            ),
            drafter=DRAFTER,
        )
        for number, prompt in enumerate(PROMPTS)
    ]
    answers = both.run(starts)
    assert both.scheduler.pool.free == both.scheduler.pool.total
    return answers


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("hybrid", [False, True], ids=["alone", "hybrid"])
def test_the_text_is_that_without_drafts_whatever_trees_are_worth(
    target: Path, draft: Path, temperature: float, hybrid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts: list[Draft] = []

    def charged(requests: Sequence[DraftRequest]) -> list[Draft | None]:
        found = propose(
            [replace(r, price=Price(0.02, 1.0)) if r.draft_len else r for r in requests]
        )
        drafts.extend(filter(None, found))
        return found

    network = load_draft_network(str(draft), str(target))
    chains = DraftChains.of(network, TOKENS)
    model = TrainedDraftModel(
        network,
        total_blocks=5,
        token_count=TOKENS,
        numerics=choose_numerics(FAST, network.model),
        chains=chains,
    )
    assert model.chains is not None
    drafter: Drafter = ModelDrafter(model)
    if hybrid:
        drafter = HybridDrafter(SuffixDrafter(), ModelDrafter(model))
    propose = drafter.propose
    monkeypatch.setattr(drafter, "propose", charged)
    sampling = SamplingParams(temperature, seed=4)
    drafted = said(target, drafter, sampling, AUTO)
    plain = said(target, SuffixDrafter(), sampling, 0)
    assert [a.token_ids for a in drafted] == [a.token_ids for a in plain]
    assert sum(answer.figures.draft_tokens for answer in drafted) > 0
    assert any(draft.priced and not draft.is_chain for draft in drafts)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("hybrid", [False, True], ids=["alone", "hybrid"])
def test_the_text_is_that_without_drafts_and_the_states_arrive(
    target: Path,
    draft: Path,
    temperature: float,
    hybrid: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    came: list[int | None] = []
    commit = ModelDrafter.commit

    def spy(
        self: ModelDrafter,
        session_id: str,
        base_len: int,
        token_ids: tuple[int, ...],
        hidden: Tensor | None = None,
    ) -> None:
        came.append(None if hidden is None else hidden.shape[0] - len(token_ids))
        commit(self, session_id, base_len, token_ids, hidden)

    monkeypatch.setattr(ModelDrafter, "commit", spy)
    network = load_draft_network(str(draft), str(target))
    # Too few blocks for both sessions at times: KV is lost and rebuilt.
    model = TrainedDraftModel(network, total_blocks=5, token_count=TOKENS)
    drafter: Drafter = ModelDrafter(model)
    if hybrid:
        drafter = HybridDrafter(SuffixDrafter(), drafter)
    sampling = SamplingParams(temperature, seed=4)
    drafted = said(target, drafter, sampling, 3)
    plain = said(target, SuffixDrafter(), sampling, 0)
    assert [a.token_ids for a in drafted] == [a.token_ids for a in plain]
    assert sum(answer.figures.draft_tokens for answer in drafted) > 0
    # Only the very first commits come before the first proposal has said what is read.
    assert came.count(None) <= 2
    assert came.count(0) == len(came) - came.count(None) > NEW_TOKENS


def test_under_the_rejection_rule_its_q_is_one(target: Path, draft: Path) -> None:
    network = load_draft_network(str(draft), str(target))
    drafter = ModelDrafter(TrainedDraftModel(network, total_blocks=64, token_count=TOKENS))
    answers = said(target, drafter, SamplingParams(1.5, seed=1), 3, REJECTION)
    assert {len(answer.token_ids) for answer in answers} == {NEW_TOKENS}
    assert sum(answer.figures.accepted_tokens for answer in answers) > 0


def count(page: str, name: str) -> float:
    found = re.search(rf"^outrider_draft_{name}_total(?:{{.*}})? (\S+)$", page, re.MULTILINE)
    assert found is not None, page
    return float(found[1])


async def test_through_services_the_states_arrive(target: Path, draft: Path) -> None:
    port = take_port("127.0.0.1", 0)
    settings = StackSettings(
        model=str(target),
        drafter="model",
        draft_model=str(draft),
        threads=1,
        # Drafts are waited for: on a tiny target none is worth it.
        verify_flags=("--draft-wait-s", "60"),
        draft_flags=("--metrics-port", str(port)),
    )

    def read() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
            body: bytes = reply.read()
            return body.decode()

    async with LocalStack(settings) as stack, AsyncClient(stack.address) as client:
        for number, prompt in enumerate(PROMPTS[:2]):
            options = {"token_ids": prompt, "max_tokens": NEW_TOKENS, "temperature": 0.8}
            plain = await client.complete(**options, seed=number, speculation=False)
            drafted = await client.complete(**options, seed=number, speculation=3)
            assert drafted.token_ids == plain.token_ids
            assert drafted.speculation.draft_tokens > 0
        page = await asyncio.to_thread(read)
    tokens = count(page, "committed_tokens")
    # All but the first token, and the last ones, after which nobody drafts.
    assert NEW_TOKENS < tokens <= 2 * NEW_TOKENS
    assert NEW_TOKENS < count(page, "committed_states") < tokens
