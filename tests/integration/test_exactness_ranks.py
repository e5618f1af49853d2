"""The law of the first tokens on one rank and on two: chains, trees, processors, both rules.

The scheduler and the runner are those of a verify worker. What is drafted is random, so that
most of it is wrong. The same test finds rules that are wrong.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import TopPLogitsWarper

from bench.tiny import write_model
from outrider.exactness.law import Law, law_of, tempered
from outrider.exactness.reference import load_reference
from outrider.exactness.statistics import chi_square
from outrider.messages import (
    AcceptanceRule,
    Draft,
    SamplingParams,
    SparseDistribution,
    SpeculationOptions,
)
from outrider.model.parallel import choosing, leader, member
from outrider.model.parallel.messages import Wanted
from outrider.sampling import rejection
from outrider.sampling.acceptance import TargetTokens, Verdict, verify_tree
from outrider.sampling.coupled import Choices
from tests.support.ranks import alone, running
from tests.support.stepping import DRAFTER, Stepper
from verify_worker import runner
from verify_worker.runner import Runner

LETTERS = 6
PROMPT = (0, 1, 2, 3)
# The law is that of the first; one more, so that drafts of two tokens are verified.
TOKENS = 3
NEW = TOKENS + 1
TEMPERATURE, TOP_P = 0.7, 0.8
# A right rule is above; it is below by chance once in a thousand seeds, and the seeds are fixed.
LEAST_P_VALUE = 0.001
SAMPLES = 600
# Enough to find a wrong one.
FEW = 350
RIGHT_GATHER = member.gather_vocabulary
SIZES = (1, 2)


@dataclass(frozen=True)
class Run:
    """What is drafted, and how tokens are drawn."""

    tree: bool = False
    top_p: float = 1.0
    rule: AcceptanceRule = AcceptanceRule.COUPLED


CHAIN, TREE = Run(), Run(tree=True)
RUNS = {
    "chain": CHAIN,
    "tree": TREE,
    "tree, top-p": Run(tree=True, top_p=TOP_P),
    "rejection": Run(rule=AcceptanceRule.REJECTION),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("target"), letters=LETTERS, scale=8.0)


@pytest.fixture(scope="module")
def models(path: Path) -> Iterator[Mapping[int, Any]]:
    """The model on so many ranks."""
    with running(path, 2, blocks=200) as ranks:
        yield {1: alone(path, blocks=200), 2: ranks.model}


@pytest.fixture(scope="module")
def laws(path: Path) -> Mapping[float, Law]:
    """The target's own, by top-p."""
    reference = load_reference(str(path))
    law = partial(law_of, reference, PROMPT, TOKENS)
    return {1.0: law(tempered(TEMPERATURE)), TOP_P: law(nucleus)}


def nucleus(logits: torch.Tensor) -> torch.Tensor:
    """As transformers has it."""
    scores: torch.Tensor = TopPLogitsWarper(TOP_P)(None, logits / TEMPERATURE)
    return scores.softmax(-1)


def drafted(run: Run, draft_len: int, chance: random.Random) -> Draft:
    """Random tokens; with the rejection rule from a q that leaves a token out."""
    if run.rule is AcceptanceRule.REJECTION:
        ids = tuple(chance.sample(range(LETTERS), LETTERS - 1))
        q = SparseDistribution(ids, tuple(range(1, LETTERS)))
        tokens = chance.choices(q.token_ids, q.weights, k=draft_len)
        return Draft(tuple(tokens), q=(q,) * draft_len)
    if not run.tree:
        return Draft(tuple(chance.randrange(LETTERS) for _ in range(draft_len)))
    # Siblings differ; those of the second level have any of them as parent.
    first = chance.sample(range(LETTERS), 3)
    second = chance.sample(range(LETTERS), 4) if draft_len > 1 else []
    parents = [chance.randrange(3) for _ in second]
    return Draft((*first, *second), (-1, -1, -1, *parents))


def draw(model: Any, run: Run, samples: int) -> tuple[Counter[tuple[int, ...]], Stepper]:
    """So many outcomes, each with a seed of its own."""
    chance = random.Random(7)
    limits: dict[str, Any] = {"vocab_size": LETTERS, "draft_len": 2, "draft_wait_s": 60}
    worker = Stepper(model, max_sessions=96, step_tokens=1024, **limits)
    worker.runner = Runner(model, LETTERS)
    for number in range(samples):
        worker.start(
            f"{number}",
            PROMPT,
            NEW,
            SamplingParams(TEMPERATURE, top_p=run.top_p, seed=chance.getrandbits(64)),
            speculation=SpeculationOptions(rule=run.rule),
            drafter=replace(DRAFTER, trusted=True),
        )
    while True:
        for session in worker.wanting:
            assert session.want is not None
            worker.propose(session, drafted(run, session.want.draft_len, chance))
        if not worker.step():
            break
    return Counter(tuple(said.tokens[:TOKENS]) for said in worker.said.values()), worker


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("size", SIZES)
def test_outcomes_follow_the_law_of_the_target(
    models: Mapping[int, Any], laws: Mapping[float, Law], size: int, run: Run
) -> None:
    gathered: list[int] = []

    def gather(own: torch.Tensor, *others: Any) -> torch.Tensor | None:
        gathered.append(len(own))
        return RIGHT_GATHER(own, *others)

    with mock.patch.object(member, "gather_vocabulary", gather):
        outcomes, worker = draw(models[size], run, SAMPLES)
    result = chi_square(outcomes, laws[run.top_p])
    assert result.samples == SAMPLES
    assert result.classes > (20 if run.top_p == 1 else 10)
    speculation = worker.scheduler.counters.speculation
    assert speculation.draft_tokens > 2 * SAMPLES
    assert speculation.accepted_tokens > SAMPLES // 10
    assert result.p_value > LEAST_P_VALUE
    # Whole rows are brought together where something needs them, and nowhere else.
    whole = run.top_p < 1 or run.rule is AcceptanceRule.REJECTION
    assert (sum(gathered) > 2 * SAMPLES) == (whole and size > 1)
    assert bool(gathered) == (whole and size > 1)


@dataclass(frozen=True)
class Unless:
    """The target's tokens, but for the first."""

    first: int
    targets: TargetTokens

    def __getitem__(self, row: int) -> int | None:
        return self.targets[row] if row else self.first


def takes_the_first(draft: Sequence[int], parents: Sequence[int], targets: TargetTokens) -> Verdict:
    if not draft or targets[1] is None:
        return verify_tree(draft, parents, targets)
    return verify_tree(draft, parents, Unless(draft[0], targets))


def softmaxed(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p - q).clamp_min(0.0).softmax(-1)


def of_rank_0(parts: Sequence[torch.Tensor], wanted: Wanted) -> Choices:
    return choosing.chosen(parts[:1], wanted)


def by_other_noise(parts: Sequence[torch.Tensor], wanted: Wanted) -> Choices:
    drawn = [replace(one, key=one.key ^ 1) for one in wanted.drawn]
    return choosing.chosen(parts, replace(wanted, drawn=drawn))


def the_wrong_way_round(*gathered: Any) -> torch.Tensor | None:
    whole = RIGHT_GATHER(*gathered)
    return None if whole is None else whole.roll(LETTERS // 2, 1)


@pytest.mark.parametrize(
    ("module", "name", "wrong", "run", "size"),
    [
        *((runner, "verify_tree", takes_the_first, TREE, size) for size in SIZES),
        (runner, "verify_tree", takes_the_first, RUNS["tree, top-p"], 2),
        (rejection, "residual", softmaxed, RUNS["rejection"], 2),
        (leader, "chosen", of_rank_0, CHAIN, 2),
        (leader, "chosen", by_other_noise, CHAIN, 2),
        (member, "gather_vocabulary", the_wrong_way_round, RUNS["tree, top-p"], 2),
    ],
)
def test_what_is_wrong_is_found(
    models: Mapping[int, Any],
    laws: Mapping[float, Law],
    module: ModuleType,
    name: str,
    wrong: Callable[..., Any],
    run: Run,
    size: int,
) -> None:
    with mock.patch.object(module, name, wrong):
        outcomes, _ = draw(models[size], run, FEW)
    assert chi_square(outcomes, laws[run.top_p]).p_value < LEAST_P_VALUE
