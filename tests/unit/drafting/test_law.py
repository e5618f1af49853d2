"""What a drafter reports as q is what it samples from, and its rows see their context."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from outrider.drafting.base import DraftLaw, DraftRequest
from outrider.drafting.draft_model import PlainDraftModel
from outrider.drafting.model import ModelDrafter
from outrider.messages import AcceptanceRule, Draft, SamplingParams, SparseDistribution
from outrider.model.loading import LoadedModel, load_model
from outrider.sampling.coupled import processed_scores, target_tokens
from outrider.sampling.rows import Row

VOCAB = 6
PROMPT = (4, 1, 1, 3)
SEEDS = 2000
# Half a unit in 2^24 for each token.
ROUNDING = 1e-6


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=None,
    )
    path = tmp_path_factory.mktemp("models") / "tiny"
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(path: Path) -> LoadedModel:
    return load_model(str(path))


class Reference:
    """The draft model by transformers alone."""

    def __init__(self, path: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(path).eval()

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        logits: torch.Tensor = self._model(torch.tensor([tokens]), use_cache=False).logits
        return logits[0, -1:].float()

    def q(self, sampling: SamplingParams, tokens: Sequence[int], law: DraftLaw) -> torch.Tensor:
        """The drafter's processed distribution after some tokens, as plain decoding has it."""
        row = Row(sampling, tokens, (), law.prompt_len, law.stop_ids)
        return processed_scores(self.logits(tokens), [row])[0].softmax(-1)


@pytest.fixture(scope="module")
def reference(path: Path) -> Reference:
    return Reference(path)


def drafts(
    model: LoadedModel, sampling: SamplingParams, law: DraftLaw, k: int, seeds: Sequence[int]
) -> list[Draft]:
    """The first draft of a session for each seed."""
    drafter = ModelDrafter(PlainDraftModel(model, total_blocks=len(seeds)))
    for seed in seeds:
        drafter.open(str(seed), PROMPT, replace(sampling, seed=seed), law)
    proposed = drafter.propose([DraftRequest(str(seed), k) for seed in seeds])
    assert None not in proposed
    return [draft for draft in proposed if draft is not None]


SAMPLINGS = {
    "top_k": SamplingParams(temperature=1.0, top_k=2),
    "temperature": SamplingParams(temperature=1.4),
    "penalties": SamplingParams(
        temperature=1.2, frequency_penalty=1.5, repetition_penalty=1.4, presence_penalty=0.5
    ),
    "bars": SamplingParams(temperature=1.0, bad_words=((3, 1), (0, 0)), min_tokens=2, min_p=0.02),
}


@pytest.mark.parametrize("q_top", [1, 2, 0])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_what_is_reported_is_what_is_sampled(
    model: LoadedModel, reference: Reference, name: str, q_top: int
) -> None:
    """Case 8: the q of every token, and the law of the tokens, given those before them."""
    sampling = SAMPLINGS[name]
    law = DraftLaw(len(PROMPT), frozenset({2}), AcceptanceRule.REJECTION, q_top)
    k = 3
    drafted: dict[tuple[int, ...], Counter[int]] = {}
    reported: dict[tuple[int, ...], SparseDistribution] = {}
    # One token that is reported is a certain one.
    for draft in drafts(model, sampling, law, k, range(50 if q_top == 1 else SEEDS)):
        assert (len(draft.token_ids), len(draft.q)) == (k, k)
        for i, (token, q) in enumerate(zip(draft.token_ids, draft.q, strict=True)):
            before = draft.token_ids[:i]
            drafted.setdefault(before, Counter())[token] += 1
            # It depends on the tokens before it alone, not on the seed.
            assert reported.setdefault(before, q) == q
    for before, counts in drafted.items():
        q = reported[before]
        assert counts.keys() <= set(q.token_ids)
        assert len(q.token_ids) <= (q_top or VOCAB)
        # The best tokens of the processed distribution, renormalised.
        p = reference.q(sampling, (*PROMPT, *before), law)
        best = p[list(q.token_ids)]
        left_out = [p[v] for v in range(VOCAB) if v not in q.token_ids]
        assert max(left_out, default=0.0) <= best.min() + 1e-6 or q_top == 0
        assert sum(left_out) < ROUNDING or len(q.token_ids) == q_top
        weights = torch.tensor(q.weights, dtype=torch.float64)
        torch.testing.assert_close(
            weights / weights.sum(), best / best.sum(), rtol=0, atol=ROUNDING * 20
        )
        total = counts.total()
        due = (weights / weights.sum() * total).tolist()
        if len(due) > 1 and min(due) >= 5:
            observed = [counts[token] for token in q.token_ids]
            assert stats.chisquare(observed, due).pvalue > 1e-4
    assert (len(drafted) > k) == (q_top != 1)


def test_a_later_position_has_noise_of_its_own(model: LoadedModel) -> None:
    """The second token is independent of the first where the model does not tie them."""
    sampling = SamplingParams(temperature=1e6)
    law = DraftLaw(len(PROMPT), rule=AcceptanceRule.REJECTION)
    pairs = Counter(d.token_ids for d in drafts(model, sampling, law, 2, range(SEEDS)))
    observed = [pairs[(a, b)] for a in range(VOCAB) for b in range(VOCAB)]
    assert stats.chisquare(observed).pvalue > 1e-3


@pytest.mark.parametrize(
    "rule", [AcceptanceRule.COUPLED, AcceptanceRule.REJECTION], ids=lambda rule: rule.value
)
def test_without_a_temperature_its_tokens_are_certain_and_have_no_q(
    model: LoadedModel, rule: AcceptanceRule
) -> None:
    (draft,) = set(drafts(model, SamplingParams(), DraftLaw(rule=rule), 3, range(20)))
    assert draft.q == ()
    assert len(draft.token_ids) == 3


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("committed", [(), (5, 0, 0)])
def test_a_coupled_drafter_applies_the_processors_with_its_context(
    model: LoadedModel, reference: Reference, name: str, committed: tuple[int, ...]
) -> None:
    """Each token is what plain decoding of the draft model would say with the same noise."""
    law = DraftLaw(len(PROMPT), frozenset({2}))
    k, seeds = 4, range(60)
    drafter = ModelDrafter(PlainDraftModel(model, total_blocks=len(seeds)))
    for seed in seeds:
        drafter.open(str(seed), PROMPT, replace(SAMPLINGS[name], seed=seed), law)
        drafter.commit(str(seed), len(PROMPT), committed)
    proposed = drafter.propose([DraftRequest(str(seed), k) for seed in seeds])
    without_draft = 0
    for seed, draft in zip(seeds, proposed, strict=True):
        assert draft is not None
        assert draft.q == ()
        sampling = replace(SAMPLINGS[name], seed=seed)
        tokens = [*PROMPT, *committed]
        for token in draft.token_ids:
            row = Row(sampling, tokens, (), law.prompt_len, law.stop_ids)
            logits = reference.logits(tokens)
            assert target_tokens(logits, [row]) == [token]
            forgetful = replace(row, sampling=SamplingParams(sampling.temperature, seed=seed))
            without_draft += target_tokens(logits, [forgetful]) != [token]
            tokens.append(token)
    assert (without_draft > 0) == (name != "temperature")


def test_a_row_that_nothing_can_be_chosen_from_ends_the_draft(model: LoadedModel) -> None:
    """After the first token every other one is a bad word: what was drafted so far stands."""
    bad_words = tuple((first, second) for first in range(VOCAB) for second in range(VOCAB))
    allowed_first = tuple((PROMPT[-1], second) for second in range(VOCAB))
    sampling = SamplingParams(
        temperature=1.0, bad_words=tuple(w for w in bad_words if w not in allowed_first)
    )
    law = DraftLaw(len(PROMPT), rule=AcceptanceRule.REJECTION)
    ended = drafts(model, replace(sampling, banned_ids=(PROMPT[-1],)), law, 3, range(20))
    for draft in ended:
        assert (len(draft.token_ids), len(draft.q)) == (1, 1)
