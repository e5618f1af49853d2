"""Cases of verify worker and draft worker together, in this process, on tiny real models."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import MambaConfig

from bench.inprocess import DRAFTER, FOREVER_S, Answer, InProcess
from outrider.drafting.base import Drafter
from outrider.drafting.draft_model import PlainDraftModel
from outrider.drafting.model import ModelDrafter
from outrider.drafting.ngram import NgramDrafter
from outrider.errors import UnsupportedModelError
from outrider.messages import (
    Endings,
    SamplingParams,
    SessionEnded,
    SpeculationOptions,
    StartSession,
)
from outrider.model.loading import load_model
from outrider.model.paged import PagedModel
from tests.support.drafters import with_context
from tests.support.models import CONTEXT, EOS, TOKENS, WINDOW, perturbed, plain_greedy, save_model
from verify_worker.scheduler import Limits


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def drafter(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return perturbed(target, tmp_path_factory.mktemp("drafter"), noise=0.05)


def workers(target: Path, drafter: Path | Drafter, *, blocks: int = 64) -> InProcess:
    """Both workers; `blocks` is the KV of each."""
    if isinstance(drafter, Path):
        drafter = ModelDrafter(
            PlainDraftModel(load_model(str(drafter)), total_blocks=64, token_count=TOKENS)
        )
    limits = Limits(context_len=CONTEXT, vocab_size=TOKENS, draft_wait_s=FOREVER_S)
    paged = PagedModel(load_model(str(target)), blocks)
    return InProcess(paged, drafter, TOKENS, limits)


def start(
    number: int,
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    new_tokens: int = 40,
    draft_len: int = 4,
) -> StartSession:
    return StartSession(
        session_id=f"s{number}",
        epoch=1,
        token_ids=tuple(prompt),
        prompt_len=len(prompt),
        sampling=sampling,
        endings=Endings(new_tokens, frozenset({EOS})),
        speculation=SpeculationOptions(enabled=draft_len > 0, draft_len=draft_len),
        drafter=DRAFTER,
    )


def solo(target: Path, prompt: Sequence[int], sampling: SamplingParams, **options: int) -> Answer:
    """What the session says alone, in plain steps, from a worker of its own."""
    (answer,) = workers(target, NgramDrafter()).run(
        [start(0, prompt, sampling, draft_len=0, **options)]
    )
    assert answer.figures.draft_tokens == 0
    return answer


def test_case_01_the_target_as_its_own_drafter_is_always_right(target: Path) -> None:
    both = workers(target, target)
    prompt = [5, 6, 7]
    (answer,) = both.run([start(0, prompt, SamplingParams(), new_tokens=200)])
    assert answer.token_ids == plain_greedy(target, prompt, 200)
    figures = answer.figures
    assert figures.acceptance_rate == 1.0
    # The first token, then four drafted ones and a bonus in each round, throughout.
    assert figures.rounds == 1 + 200 // 5
    assert figures.accepted_per_position == [figures.drafts] * 3 + [figures.drafts - 1]


def test_case_02_kv_after_every_round(target: Path, drafter: Path) -> None:
    model = ModelDrafter(
        PlainDraftModel(load_model(str(drafter)), total_blocks=64, token_count=TOKENS)
    )
    both = workers(target, model)
    accepted: set[int] = set()
    for seed in range(8):
        sampling = SamplingParams(0.8, seed=seed)
        (answer,) = both.begin([start(seed, [1, 2, 3], sampling)])
        while both.scheduler.sessions:
            before = answer.figures.accepted_tokens
            both.step()
            accepted.add(answer.figures.accepted_tokens - before)
            for session in both.scheduler.sessions.values():
                assert session.table.kv_len == len(session.tokens) - 1
        assert answer.token_ids == solo(target, [1, 2, 3], sampling).token_ids
    # Every count of accepted tokens came about.
    assert accepted == set(range(5))
    assert both.scheduler.pool.free == both.scheduler.pool.total
    assert model.free_blocks == model.total_blocks


def test_case_04_sixteen_at_once_half_of_them_repetitive(target: Path) -> None:
    prompts = [
        [n, n + 1, n + 2] * 5 if n % 2 else [(7 * n + t * t) % TOKENS for t in range(11)]
        for n in range(16)
    ]
    # Low enough to fall into repetition, of which lookup makes drafts.
    samplings = [SamplingParams(0.3 if n % 4 else 0.0, seed=n) for n in range(16)]
    starts = [
        start(n, prompt, sampling)
        for n, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]
    answers = workers(target, NgramDrafter()).run(starts)
    drafted = [answer.figures.draft_tokens for answer in answers]
    assert sum(tokens > 0 for tokens in drafted) >= 4
    for prompt, sampling, answer in zip(prompts, samplings, answers, strict=True):
        assert answer.token_ids == solo(target, prompt, sampling).token_ids


def test_case_05_blocks_of_a_finished_session_are_used_again(target: Path, drafter: Path) -> None:
    # 4 blocks hold one session of 64 tokens and no second one.
    both = workers(target, drafter, blocks=4)
    sampling = SamplingParams(0.9, seed=3)
    same_start = [9, 8, 7] * 6
    for number, prompt in enumerate([same_start, [*same_start, 1], [4] * 17, same_start]):
        (answer,) = both.run([start(number, prompt, sampling)])
        assert answer.token_ids == solo(target, prompt, sampling).token_ids
        assert both.scheduler.pool.free == 4


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 32, 33])
def test_case_06_prompts_at_block_boundaries(target: Path, drafter: Path, tokens: int) -> None:
    prompt = [(5 * t) % TOKENS for t in range(tokens)]
    (answer,) = workers(target, drafter).run([start(0, prompt, SamplingParams())])
    assert answer.token_ids == plain_greedy(target, prompt, 40)
    assert answer.figures.draft_tokens > 0
    sampling = SamplingParams(0.8, seed=tokens)
    (answer,) = workers(target, drafter).run([start(0, prompt, sampling)])
    assert answer.token_ids == solo(target, prompt, sampling).token_ids


def test_case_07_a_sliding_window_is_passed_with_rejections(tmp_path: Path) -> None:
    target = save_model(tmp_path / "target", "gemma2")
    drafter = perturbed(target, tmp_path / "drafter", noise=0.2)
    prompt, new_tokens = [3, 1, 4, 1, 5], 4 * WINDOW
    (answer,) = workers(target, drafter).run(
        [start(0, prompt, SamplingParams(), new_tokens=new_tokens)]
    )
    assert answer.token_ids == plain_greedy(target, prompt, new_tokens)
    for seed in range(4):
        sampling = SamplingParams(1.5, seed=seed)
        (answer,) = workers(target, drafter).run(
            [start(0, prompt, sampling, new_tokens=new_tokens)]
        )
        expected = solo(target, prompt, sampling, new_tokens=new_tokens)
        assert answer.token_ids == expected.token_ids
        assert 0 < answer.figures.accepted_tokens < answer.figures.draft_tokens


def test_case_07_a_recurrent_model_is_refused_with_the_reason(tmp_path: Path) -> None:
    MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="recurrent"):
        load_model(str(tmp_path))


def test_case_17_past_the_context_of_the_drafter_it_goes_on_plainly(
    target: Path, drafter: Path, tmp_path: Path
) -> None:
    short = with_context(drafter, tmp_path / "short", 32)
    prompt, sampling = [2, 7, 1, 8], SamplingParams(0.8, seed=5)
    both = workers(target, short)
    (answer,) = both.begin([start(0, prompt, sampling, new_tokens=80)])
    drafted_at: list[int] = []
    while both.scheduler.sessions:
        length, before = len(prompt) + len(answer.token_ids), answer.figures.draft_tokens
        both.step()
        if answer.figures.draft_tokens > before:
            drafted_at.append(length)
    assert answer.token_ids == solo(target, prompt, sampling, new_tokens=80).token_ids
    assert len(answer.token_ids) == 80
    assert isinstance(answer.ended, SessionEnded)
    # It drafts as long as it can, and then says nothing more.
    assert len(drafted_at) > 4
    assert 28 <= max(drafted_at) <= 32


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_case_19_penalties_with_the_target_as_its_own_drafter(
    target: Path, temperature: float
) -> None:
    sampling = SamplingParams(
        temperature,
        seed=4,
        frequency_penalty=1.0,
        presence_penalty=0.5,
        repetition_penalty=1.2,
        bad_words=((1,), (2, 3)),
        min_tokens=10,
    )
    prompt = [8, 9] * 6
    (answer,) = workers(target, target).run([start(0, prompt, sampling, new_tokens=60)])
    assert answer.token_ids == solo(target, prompt, sampling, new_tokens=60).token_ids
    # Each accepted token was counted once and rejected ones never, by both sides.
    assert answer.figures.acceptance_rate == 1.0
    assert answer.figures.draft_tokens >= 40
