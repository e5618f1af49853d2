"""Edges of the processors that transformers has no word on."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.messages import SamplingParams
from outrider.sampling import processors
from outrider.sampling.coupled import choose, processed_scores, target_tokens, unusable_rows
from outrider.sampling.processors import constrained_scores, constrains, warped_scores
from outrider.sampling.rows import Row

LOGITS = torch.tensor([[0.5, -1.0, 2.0, 0.0]])
SAMPLED = SamplingParams(temperature=1.0)


def scores(sampling: SamplingParams, row: Row | None = None) -> list[float]:
    row = replace(row or Row(sampling, (0, 1)), sampling=sampling)
    values: list[float] = processed_scores(LOGITS, [row])[0].tolist()
    return values


BARRED = -torch.inf


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(logit_bias=((4, 1.0), (2**32 - 1, 1.0))),
        SamplingParams(bad_words=((4,), (1, 2**32 - 1))),
        SamplingParams(bad_words=((),)),
        SamplingParams(banned_ids=(4, 2**32 - 1)),
        SamplingParams(min_tokens=5),
    ],
)
def test_what_can_not_be_chosen_anyway_is_passed_over(sampling: SamplingParams) -> None:
    row = Row(sampling, (0, 1), (), 2, frozenset({4, 99}))
    assert scores(sampling, row) == [0.5, -1.0, 2.0, 0.0]


def test_a_penalty_for_ids_that_this_vocabulary_lacks() -> None:
    # As in a drafter whose vocabulary ends before the target's.
    row = Row(SAMPLED, (0, 9), (7, 2, 2, 7, 4), 1)
    penalised = SamplingParams(frequency_penalty=0.5, presence_penalty=1.0)
    assert scores(penalised, row) == [0.5, -1.0, 0.0, 0.0]
    assert scores(SamplingParams(repetition_penalty=2.0), row) == [0.25, -1.0, 1.0, 0.0]


def test_allowed_ids_outside_of_the_vocabulary_allow_nothing() -> None:
    sampling = SamplingParams(allowed_ids=(4, 1))
    assert scores(sampling) == [BARRED, -1.0, BARRED, BARRED]
    assert scores(SamplingParams(allowed_ids=(4,))) == [BARRED] * 4


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1.0])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(banned_ids=(0, 1, 2, 3)),
        SamplingParams(allowed_ids=(2,), bad_words=((2,),)),
        SamplingParams(allowed_ids=(3,), min_tokens=1, top_k=2, top_p=0.5, min_p=0.5),
    ],
)
def test_a_row_with_every_token_barred_is_named(
    sampling: SamplingParams, temperature: float
) -> None:
    sampling = replace(sampling, temperature=temperature)
    rows = [Row(SAMPLED, (0,)), Row(sampling, (0, 1), (), 2, frozenset({3})), Row(SAMPLED, (0,))]
    processed = processed_scores(LOGITS.expand(3, -1), rows)
    assert unusable_rows(processed) == [1]
    assert choose(LOGITS.expand(3, -1), rows).dead == [1]


def test_dead_rows() -> None:
    """Of raw logits: what is no number, and what the constraints leave nothing of."""
    logits = LOGITS.repeat(6, 1)
    logits[0, 1] = torch.nan
    logits[3, 2] = torch.inf
    free, barred = Row(SAMPLED, (0,)), Row(SamplingParams(allowed_ids=(9,)), (0,))
    bound = Row(SamplingParams(banned_ids=(1,)), (0,))
    assert choose(logits, [free] * 6).dead == [0, 3]
    assert choose(logits, [free, bound, barred, free, barred, bound]).dead == [0, 2, 3, 4]
    assert choose(LOGITS.repeat(2, 1), [bound, free]).dead == []
    # A number that was no number stays named when its token is barred.
    assert choose(logits[:1], [bound]).dead == [0]


def test_a_word_is_barred_across_committed_and_drafted_tokens() -> None:
    word = SamplingParams(bad_words=((5, 6, 7, 2),))
    free, barred = [0.5, -1.0, 2.0, 0.0], [0.5, -1.0, BARRED, 0.0]
    for split in range(5):
        context = (9, 5, 6, 7)
        assert scores(word, Row(word, context[:split], context[split:])) == barred
        assert scores(word, Row(word, (9, *context)[:split], (5, 6, 8))) == free
        # Drafted tokens come after the committed ones.
        assert scores(word, Row(word, context[split:], context[:split])) == (
            barred if split in (0, 4) else free
        )
    assert scores(word, Row(word, (5, 6, 7))) == barred
    assert scores(word, Row(word, (6, 7))) == free
    assert scores(word, Row(word, (5, 6, 7, 5))) == free


def test_a_word_counts_from_the_prompt_on() -> None:
    word = SamplingParams(bad_words=((1, 2),))
    assert scores(word, Row(word, (0, 1), (), 2)) == [0.5, -1.0, BARRED, 0.0]


def test_penalties_of_the_completion_leave_the_prompt_alone() -> None:
    sampling = SamplingParams(frequency_penalty=1.0, presence_penalty=0.25)
    row = Row(sampling, (0, 0, 3, 2), (2, 1), prompt_len=3)
    assert scores(sampling, row) == [0.5, -2.25, -0.25, 0.0]
    # The repetition penalty is of the prompt too; a score of 0 stays what it is.
    repeated = SamplingParams(repetition_penalty=2.0)
    assert scores(repeated, row) == [0.25, -2.0, 1.0, 0.0]


def test_the_order_of_bias_and_penalties() -> None:
    sampling = SamplingParams(
        logit_bias=((2, 2.0),), repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25
    )
    # (2.0 + 2.0) / 2 - 0.5 - 0.25 for one occurrence.
    assert scores(sampling, Row(sampling, (0, 2), (), 1)) == [0.25, -1.0, 1.25, 0.0]


@pytest.mark.parametrize("stop_ids", [{2}, {2, 3}])
def test_stop_ids_are_barred_for_min_tokens(stop_ids: set[int]) -> None:
    sampling = SamplingParams(min_tokens=3)
    for completion_len in range(5):
        for drafted in range(completion_len + 1):
            row = Row(
                sampling, (0,) * (2 + completion_len - drafted), (0,) * drafted, 2,
                frozenset(stop_ids),
            )  # fmt: skip
            barred = {i for i, score in enumerate(scores(sampling, row)) if score == BARRED}
            assert barred == (stop_ids if completion_len < 3 else set())


def test_top_p_keeps_the_best_whatever_its_value() -> None:
    for top_p in (1e-9, 1e-17, 0.0):
        assert scores(replace(SAMPLED, top_p=top_p)) == [BARRED, BARRED, 0.0, BARRED]
        # Where the masses add up to exactly 1, nothing but the rule that one stays keeps it.
        quarters = processed_scores(torch.zeros(1, 4), [Row(replace(SAMPLED, top_p=top_p), (0,))])
        assert quarters.isfinite().tolist() == [[False, False, False, True]]
    # Exactly half: the other half goes.
    even = processed_scores(torch.zeros(1, 8), [Row(replace(SAMPLED, top_p=0.5), (0,))])
    assert int(even.isfinite().sum()) == 4
    # Of equals, those with the highest ids.
    flat = processed_scores(torch.zeros(1, 64), [Row(replace(SAMPLED, top_p=0.3), (0,))])
    assert flat[0].isfinite().nonzero().flatten().tolist() == list(range(44, 64))


def test_without_top_p_the_least_likely_token_stays() -> None:
    # Its mass is 0 in float64; its score is not.
    processed = processed_scores(torch.tensor([[0.0, -800.0]]), [Row(SAMPLED, (0,))])
    assert processed.tolist() == [[0.0, -800.0]]


def test_top_k_keeps_equals_of_the_last() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 0.0]])
    for top_k, kept in [(1, 1), (2, 3), (3, 3), (4, 4), (5, 4), (0, 4)]:
        processed = processed_scores(logits, [Row(replace(SAMPLED, top_k=top_k), (0,))])
        assert int(processed.isfinite().sum()) == kept


def test_min_p_is_relative_to_the_best() -> None:
    logits = torch.tensor([[0.4, 0.2, 0.1, 0.3]]).log()
    for min_p, kept in [(0.0, 4), (0.24, 4), (0.26, 3), (0.74, 2), (0.76, 1), (1.0, 1)]:
        processed = processed_scores(logits, [Row(replace(SAMPLED, min_p=min_p), (0,))])
        assert int(processed.isfinite().sum()) == kept


def test_without_processors_nothing_is_changed() -> None:
    assert not constrains(SamplingParams(temperature=0.3, top_k=3, top_p=0.4, min_p=0.1, seed=3))
    assert scores(SamplingParams()) == [0.5, -1.0, 2.0, 0.0]


def test_the_logits_that_came_in_stay_as_they_were() -> None:
    sampling = SamplingParams(banned_ids=(2,), temperature=0.5)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        logits = LOGITS.to(dtype)
        row = Row(sampling, (0,))
        constrained = constrained_scores(logits, [row])
        warped = warped_scores(constrained, [sampling])
        assert target_tokens(logits, [row]) != [2]
        assert constrained.dtype == warped.dtype == torch.float64
        assert torch.equal(logits, LOGITS.to(dtype))
        assert constrained.tolist() == [[0.5, -1.0, BARRED, 0.0]]


def test_rows_that_do_not_belong_to_the_logits_are_refused() -> None:
    for rows in ([], [Row(SAMPLED, (0,))] * 2):
        with pytest.raises(ValueError, match="zip"):
            constrained_scores(LOGITS, rows)
    with pytest.raises(ValueError, match="zip"):
        warped_scores(LOGITS.double().expand(2, -1), [SAMPLED])


def test_rows_of_a_batch_keep_to_themselves() -> None:
    banned = SamplingParams(banned_ids=(2,))
    rows = [Row(SamplingParams(), (0,)), Row(banned, (0,)), Row(SAMPLED, (0,))]
    greedy, constrained, sampled = processed_scores(LOGITS.expand(3, -1), rows).tolist()
    assert greedy == [0.5, -1.0, 2.0, 0.0]
    assert constrained == [0.5, -1.0, BARRED, 0.0]
    assert sampled == [-1.5, -3.0, 0.0, -2.0]


def top_p_by_sorting(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """The scores of one row at temperature 1, with the tail cut as the definition says."""
    scores = logits.double() - logits.double().max()
    ordered, order = scores.sort(stable=True)
    cut = ordered.softmax(0).cumsum(0) <= 1.0 - top_p
    cut[-1] = False
    scores[order[cut]] = -torch.inf
    return scores


def sorted_rows(
    logits: torch.Tensor, top_p: list[float], monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """Check rows that share a batch; which of them took a sort of the vocabulary."""
    seen: list[torch.Tensor] = []
    sort = processors._keep_top_p_of_all

    def counted(score: torch.Tensor, share: float) -> None:
        seen.append(score.clone())
        sort(score, share)

    with monkeypatch.context() as patch:
        patch.setattr(processors, "_keep_top_p_of_all", counted)
        samplings = [replace(SAMPLED, top_p=share) for share in top_p]
        warped = warped_scores(logits.double(), samplings)
    for r, share in enumerate(top_p):
        assert torch.equal(warped[r], top_p_by_sorting(logits[r], share)), (r, share)
    whole = logits.double() - logits.double().amax(-1, keepdim=True)
    return [r for r in range(len(top_p)) if any(torch.equal(whole[r], one) for one in seen)]


@pytest.mark.parametrize("vocab_size", [2, 8, 255, 256, 257, 900])
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_top_p_is_decided_by_the_few_best_as_by_a_sort(
    vocab_size: int, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(40, vocab_size, generator=generator) * scale
    # A last token of almost no mass, so that something is cut in any case.
    logits[:, -1] = -30.0
    shares = [0.05 + 0.9 * r / 40 for r in range(40)]
    took = sorted_rows(logits, shares, monkeypatch)
    # With many likely tokens the few best may not be enough.
    assert took == [] or (vocab_size == 900 and scale == 1.0 and 0 not in took)


def test_top_p_sorts_where_the_few_best_do_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    clear = torch.zeros(600)
    clear[:3] = torch.tensor([20.0, 19.0, 18.0])
    flat = torch.linspace(0.0, 0.1, 600)
    # The last that is kept has an equal that is cut.
    equals = clear.clone()
    equals[[100, 200, 300]] = 19.0
    # Just as much mass as is asked for, or so nearly that a sum in another order may differ.
    halves = torch.full((600,), -200.0)
    halves[[5, 9]] = 0.0
    nearly = halves.clone()
    nearly[9] = -1e-5
    logits = torch.stack([clear, flat, equals, halves, nearly, clear.roll(1)])
    exact = float(nearly.double().softmax(0)[5])
    shares = [0.9, 0.9, 0.5, 0.5, exact + 2e-10, 1e-12]
    assert sorted_rows(logits, shares, monkeypatch) == [1, 2, 3, 4, 5]
    shares = [0.9, 0.05, 0.9, 0.6, exact + 2e-9, 1e-8]
    assert sorted_rows(logits, shares, monkeypatch) == []


def test_each_row_of_a_batch_has_its_own_cuts() -> None:
    logits = torch.randn(12, 40, generator=torch.Generator().manual_seed(3)).double() * 2
    wishes: list[dict[str, Any]] = [
        {},
        {"top_k": 3},
        {"top_k": 30},
        {"top_k": 40},
        {"top_p": 0.6},
        {"top_p": 0.95},
        {"min_p": 0.5},
        {"min_p": 0.01},
        {"top_k": 5, "top_p": 0.5},
        {"top_p": 0.9, "min_p": 0.1},
        {"top_k": 7, "top_p": 0.9, "min_p": 0.2},
        {"top_k": 1},
    ]
    samplings = [replace(SAMPLED, **wish) for wish in wishes]
    together = warped_scores(logits, samplings)
    for r, sampling in enumerate(samplings):
        assert torch.equal(together[r], warped_scores(logits[r : r + 1], [sampling])[0])
    kept = together.isfinite().sum(-1)
    assert kept[[0, 1, 2, 3, 11]].tolist() == [40, 3, 30, 40, 1]
    assert all(1 <= count < 40 for count in kept[4:].tolist())
    # A batch of which all want the same.
    for some in ([1, 2], [4, 5], [6, 7], [0, 3], [10]):
        chosen = warped_scores(logits[some], [samplings[r] for r in some])
        assert torch.equal(chosen, together[some])
