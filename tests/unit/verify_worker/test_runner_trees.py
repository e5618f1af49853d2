"""Trees in the runner, with a real tiny model: one forward, one verdict, one move of KV a step."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.messages import Draft, SamplingParams, TokenOrigin
from outrider.model.loading import LoadedModel, load_model
from outrider.model.paged import Segment
from outrider.model.pages import KvPages
from outrider.model.rows import StepOutput
from tests.support.models import TOKENS, save_model
from tests.support.stepping import Reference, Stepper

SAMPLINGS = [SamplingParams(), SamplingParams(0.8, seed=5)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def model(path: Path) -> LoadedModel:
    return load_model(str(path))


@pytest.fixture(scope="module")
def reference(path: Path) -> Reference:
    return Reference(path)


def prefilled(
    model: LoadedModel, prompts: Sequence[list[int]], sampling: SamplingParams
) -> Stepper:
    """Sessions with one token each, that wait for drafts of four tokens."""
    worker = Stepper(model, draft_len=4)
    for number, prompt in enumerate(prompts):
        worker.start(f"s{number}", prompt, 30, sampling)
    while len(worker.wanting) < len(prompts):
        assert worker.step()
    return worker


def mixed(right: list[int]) -> Draft:
    """The right path as the nodes 1, 3, 4 and 6, with others between."""
    wrong = [(token + 1) % TOKENS for token in right]
    tokens = (wrong[0], right[0], wrong[1], right[1], right[2], wrong[2], right[3])
    return Draft(tokens, (-1, -1, 0, 1, 3, 3, 4))


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_a_step_with_trees_is_one_forward_and_one_move(
    model: LoadedModel,
    reference: Reference,
    sampling: SamplingParams,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = [[1, 2, 3], [4] * 20, [9]]
    worker = prefilled(model, prompts, sampling)
    for session in worker.wanting:
        right = reference.continuation(session.tokens, 4, sampling)
        worker.propose(session, mixed(right) if session.prompt_len > 1 else Draft(tuple(right)))
    forwards, moves = [], []
    step, move = worker.paged.step, KvPages.move

    def spied(segments: Sequence[Segment]) -> StepOutput:
        forwards.append([len(segment.token_ids) for segment in segments])
        return step(segments)

    def moved(self: KvPages, source: torch.Tensor, target: torch.Tensor) -> None:
        moves.append(len(source))
        move(self, source, target)

    monkeypatch.setattr(worker.paged, "step", spied)
    monkeypatch.setattr(KvPages, "move", moved)
    assert worker.step()
    assert forwards == [[8, 8, 5]]
    # The four accepted rows of both trees lie elsewhere; those of the chain are in place.
    assert moves == [8]
    for number, prompt in enumerate(prompts):
        said = worker.said[f"s{number}"]
        assert said.tokens == reference.continuation(prompt, 6, sampling)
        assert said.progress[-1].origins == (*[TokenOrigin.ACCEPTED] * 4, TokenOrigin.BONUS)
    while worker.scheduler.sessions:
        assert worker.step()
    assert worker.said["s0"].tokens == reference.continuation(prompts[0], 30, sampling)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize(("dead_node", "said"), [(0, 5), (1, 1), (2, 5), (3, 2), (4, 3), (6, 4)])
def test_case_9_a_dead_node_ends_the_path_before_it(
    model: LoadedModel,
    reference: Reference,
    sampling: SamplingParams,
    dead_node: int,
    said: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = prefilled(model, [[1, 2, 3]], sampling)
    (session,) = worker.wanting
    worker.propose(session, mixed(reference.continuation(session.tokens, 4, sampling)))
    step = worker.paged.step

    def damaged(segments: Any) -> StepOutput:
        output = step(segments)
        output.logits[dead_node + 1, 7] = torch.nan
        return output

    with monkeypatch.context() as patch:
        patch.setattr(worker.paged, "step", damaged)
        assert worker.step()
    assert len(worker.said["s0"].tokens) == 1 + said
    while worker.scheduler.sessions:
        assert worker.step()
    assert worker.said["s0"].tokens == reference.continuation([1, 2, 3], 30, sampling)
