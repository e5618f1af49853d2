"""Trees from a draft model to the target and back: both workers, joined by the wire format."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench.inprocess import DRAFTER, FOREVER_S, Answer, InProcess
from outrider.drafting.base import DraftRequest
from outrider.drafting.draft_model import PlainDraftModel
from outrider.drafting.model import ModelDrafter
from outrider.messages import (
    AcceptanceRule,
    Draft,
    Endings,
    LogprobOptions,
    SamplingParams,
    SpeculationOptions,
    StartSession,
)
from outrider.model.loading import LoadedModel, load_model
from outrider.model.paged import PagedModel
from tests.support.models import CONTEXT, EOS, TOKENS, perturbed, save_model
from verify_worker.scheduler import Limits

PROMPTS = [[3, 1, 4], list(range(40, 56)), [7, 8] * 20, [250], [11 * t % 250 for t in range(33)]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(path: Path) -> LoadedModel:
    return load_model(str(path))


@pytest.fixture(scope="module")
def drafter(path: Path, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(str(perturbed(path, tmp_path_factory.mktemp("drafter"), noise=0.15)))


def workers(
    target: LoadedModel, drafter: LoadedModel, width: int, blocks: int = 90, **limits: int
) -> InProcess:
    model = ModelDrafter(
        PlainDraftModel(drafter, total_blocks=90, token_count=TOKENS), tree_width=width
    )
    values = {"context_len": CONTEXT, "vocab_size": TOKENS, **limits}
    return InProcess(
        PagedModel(target, blocks), model, TOKENS, Limits(**values, draft_wait_s=FOREVER_S)
    )


def starts(sampling: SamplingParams, *, draft_len: int = 4, new: int = 40) -> list[StartSession]:
    return [
        StartSession(
            session_id=f"s{number}",
            epoch=1,
            token_ids=tuple(prompt),
            prompt_len=len(prompt),
            sampling=replace(sampling, seed=number),
            endings=Endings(new, frozenset({EOS})),
            speculation=SpeculationOptions(enabled=draft_len > 0, draft_len=draft_len),
            logprobs=LogprobOptions(top=2),
            drafter=DRAFTER,
        )
        for number, prompt in enumerate(PROMPTS)
    ]


def told(answers: list[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(0.8),
        SamplingParams(0.8, top_k=40, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.4),
    ],
    ids=["greedy", "sampled", "processed"],
)
def test_trees_say_the_same_in_no_more_rounds_than_chains(
    target: LoadedModel, drafter: LoadedModel, sampling: SamplingParams
) -> None:
    off = workers(target, drafter, 1).run(starts(sampling, draft_len=0))
    chains = workers(target, drafter, 1).run(starts(sampling))
    both = workers(target, drafter, 3)
    trees = both.run(starts(sampling))
    assert told(trees) == told(chains) == told(off)
    for answer, plain in zip(trees, off, strict=True):
        actual = [entry.logprob for entry in answer.logprobs]
        assert actual == pytest.approx([entry.logprob for entry in plain.logprobs], abs=1e-3)
        assert 0 < answer.figures.acceptance_rate <= 1
        positions = answer.figures.accepted_per_position
        assert sum(positions) == answer.figures.accepted_tokens
        assert len(positions) <= 4
    # From one place on a tree accepts what the chain in it does, or more, so no session takes
    # more rounds; and these take fewer.
    rounds = [
        (tree.figures.rounds, chain.figures.rounds)
        for tree, chain in zip(trees, chains, strict=True)
    ]
    assert all(tree <= chain for tree, chain in rounds)
    assert sum(tree for tree, _ in rounds) < sum(chain for _, chain in rounds)
    assert both.scheduler.counters.malformed_proposals == 0
    assert both.scheduler.pool.free == both.scheduler.pool.total


def test_in_a_pool_that_is_far_too_small(target: LoadedModel, drafter: LoadedModel) -> None:
    sampling = SamplingParams(0.8)
    off = workers(target, drafter, 1).run(starts(sampling, draft_len=0))
    small = workers(target, drafter, 4, blocks=7, step_tokens=24)
    assert told(small.run(starts(sampling))) == told(off)
    assert small.scheduler.counters.preemptions > 0
    assert small.scheduler.pool.free == small.scheduler.pool.total


@pytest.mark.parametrize(("max_nodes", "most"), [(0, 4), (3, 4), (4, 4), (5, 5), (7, 7), (99, 12)])
def test_the_drafter_keeps_to_the_size_that_the_target_takes(
    target: LoadedModel,
    drafter: LoadedModel,
    max_nodes: int,
    most: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []
    propose = ModelDrafter.propose

    def recorded(self: ModelDrafter, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        drafts = propose(self, requests)
        sizes.extend(len(draft.token_ids) for draft in drafts if draft is not None)
        return drafts

    monkeypatch.setattr(ModelDrafter, "propose", recorded)
    both = workers(target, drafter, 3, max_tree_nodes=max_nodes)
    both.run(starts(SamplingParams(0.8), new=20))
    assert both.scheduler.counters.malformed_proposals == 0
    assert max(sizes) == most


def test_the_rejection_rule_gets_chains(target: LoadedModel, drafter: LoadedModel) -> None:
    both = workers(target, drafter, 3)
    rejection = SpeculationOptions(draft_len=4, rule=AcceptanceRule.REJECTION)
    answers = both.run([replace(s, speculation=rejection) for s in starts(SamplingParams(0.8))])
    assert both.scheduler.counters.malformed_proposals == 0
    for answer in answers:
        assert answer.figures.accepted_tokens > 0
        assert answer.figures.draft_tokens <= 4 * answer.figures.drafts


@pytest.mark.parametrize("room", range(1, 9))
def test_case_16_at_the_end_of_the_context(
    target: LoadedModel, drafter: LoadedModel, room: int
) -> None:
    sampling = SamplingParams(0.8)
    prompt = tuple(11 * t % 250 for t in range(CONTEXT - room))
    begin = replace(
        starts(sampling, new=100)[0], token_ids=prompt, prompt_len=len(prompt), logprobs=None
    )
    off = replace(begin, speculation=SpeculationOptions(enabled=False))
    (plain,) = workers(target, drafter, 1).run([off])
    (answer,) = workers(target, drafter, 6).run([begin])
    assert answer.token_ids == plain.token_ids
    assert len(answer.token_ids) == room or answer.token_ids[-1] == EOS
    assert answer.ended == plain.ended
