"""The law of the first tokens through real services, and drafter invariance: small versions
of `python -m bench law` and `python -m bench invariance`.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from bench import invariance, law
from bench.requests import random_request
from bench.tiny import write_model, write_noisy
from outrider.client import AsyncClient
from outrider.exactness.law import Law, law_of, tempered
from outrider.exactness.reference import load_reference
from outrider.exactness.statistics import chi_square

pytestmark = pytest.mark.timeout(300)

SETTINGS = law.Settings(samples=1500, at_once=64)
# Fewer letters than the benchmark has, so that fewer outcomes are enough.
LETTERS = 6


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    where = tmp_path_factory.mktemp("pair")
    target = write_model(where / "target", letters=LETTERS, scale=5.0)
    return target, write_noisy(target, where / "drafter", noise=1.0)


@pytest.fixture(scope="module")
def target_law(pair: tuple[Path, Path]) -> Law:
    reference = load_reference(str(pair[0]))
    return law_of(reference, law.PROMPT, SETTINGS.tokens, tempered(SETTINGS.temperature))


@pytest.mark.parametrize("run", law.RUNS, ids=lambda run: run.name)
async def test_outcomes_follow_the_law_of_the_target_unless_the_rule_is_wrong(
    run: law.Run, pair: tuple[Path, Path], target_law: Law
) -> None:
    stack = law.stack_settings(*pair, SETTINGS)
    drawn, _ = await law.draw(stack, run, SETTINGS, SETTINGS.samples)
    result = chi_square(drawn.outcomes, target_law)
    assert result.samples == SETTINGS.samples
    assert result.classes > 50
    assert drawn.figures.draft_tokens > SETTINGS.samples
    assert 0.1 < drawn.figures.acceptance_rate < 0.9
    if run.fault:
        assert result.p_value < law.LEAST_P_VALUE
    else:
        assert result.p_value > law.LEAST_P_VALUE


async def test_seeded_tokens_do_not_depend_on_drafter_draft_length_batch_or_threads(
    tmp_path: Path,
) -> None:
    models = invariance.write_models(tmp_path)
    requests = [
        random_request(number, vocab_size=invariance.LETTERS, max_tokens=16) for number in range(24)
    ]
    comparison = invariance.Comparison(models, requests)

    async def compare(drafter: str, threads: int, runs: Sequence[tuple[int, int]]) -> None:
        stack = invariance.stack_of(models, drafter, threads)
        async with stack, AsyncClient(stack.address) as client:
            for at_once, draft_len in runs:
                said = await invariance.run_all(
                    client, requests, at_once=at_once, first_draft_len=draft_len
                )
                name = f"{drafter} {threads} {at_once} {draft_len}"
                drafts = draft_len > 0 and drafter != "malformed"
                comparison.add(name, said, drafts=drafts)

    await compare("ngram", 1, [(1, 0), (16, 0), (16, 1)])
    await compare("model", 2, [(1, 2), (16, 6)])
    await compare("random", 1, [(16, 3)])
    await compare("adversarial", 2, [(16, 4)])
    await compare("malformed", 1, [(16, 5)])
    assert comparison.compared == 8 * 24
    assert comparison.differing == 0, comparison.report.rows
    assert all(bar.met for bar in comparison.report.bars)
