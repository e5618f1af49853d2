"""Every processor means what it means in transformers, alone and together, on every row."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.messages import SamplingParams
from outrider.sampling.acceptance import verify_chain
from outrider.sampling.coupled import processed_scores, target_tokens, unusable_rows
from outrider.sampling.rows import Row
from tests.unit.sampling.reference import expected_scores

VOCAB = 12

ids = st.integers(0, VOCAB - 1)
# Numbers that float32 holds, since transformers keeps biases in it.
numbers = st.floats(-8, 8, width=16)
some_ids = st.lists(ids, min_size=1, max_size=6, unique=True).map(tuple)
words = st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), min_size=1, max_size=6)
PROCESSORS: dict[str, st.SearchStrategy[Any]] = {
    "logit_bias": st.dictionaries(ids, numbers, min_size=1).map(lambda d: tuple(d.items())),
    "repetition_penalty": st.floats(0.25, 4),
    "frequency_penalty": st.floats(-2, 2),
    "presence_penalty": st.floats(-2, 2),
    "bad_words": words.map(tuple),
    "min_tokens": st.integers(1, 6),
    "allowed_ids": some_ids,
    "banned_ids": some_ids,
    "temperature": st.floats(0.05, 20),
    "top_k": st.integers(1, VOCAB + 3),
    "top_p": st.floats(0.01, 0.99),
    "min_p": st.floats(0.01, 1),
}


@st.composite
def contexts(draw: st.DrawFn) -> Row:
    """A row somewhere in a draft, without sampling parameters; few ids, so that they repeat."""
    few = st.integers(0, 4)
    committed = draw(st.lists(few, min_size=1, max_size=6))
    prompt_len = draw(st.integers(1, len(committed)))
    drafted = draw(st.lists(few, max_size=4))
    stop_ids = draw(st.frozensets(ids, max_size=3))
    return Row(SamplingParams(), tuple(committed), tuple(drafted), prompt_len, stop_ids)


def draw_logits(draw: st.DrawFn) -> torch.Tensor:
    """Half of the time with ties, and now and then with zeros in p."""
    if draw(st.booleans()):
        few = st.sampled_from([-torch.inf, -1.0, 0.0, 0.5, 2.0])
        values: list[float] = draw(st.lists(few, min_size=VOCAB, max_size=VOCAB))
        assume(max(values) > -torch.inf)
        return torch.tensor(values, dtype=torch.float64)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    scale = draw(st.sampled_from([1, 4]))
    return torch.randn(VOCAB, generator=generator, dtype=torch.float64) * scale


@st.composite
def rows(draw: st.DrawFn, names: Sequence[str]) -> tuple[torch.Tensor, Row]:
    """Logits and a row with the named processors at work, and a temperature for the warpers."""
    values = {name: draw(PROCESSORS[name]) for name in names}
    if {"top_k", "top_p", "min_p"}.intersection(names):
        values.setdefault("temperature", 1.0)
    return draw_logits(draw), replace(draw(contexts()), sampling=SamplingParams(**values))


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[torch.Tensor, Row]]:
    """Rows with random combinations of processors, which share a batch."""
    choices = st.lists(st.sampled_from(sorted(PROCESSORS)), unique=True)
    return [draw(rows(draw(choices))) for _ in range(draw(st.integers(1, 4)))]


def assert_parity(batch: Sequence[tuple[torch.Tensor, Row]]) -> None:
    logits = torch.stack([row_logits for row_logits, _ in batch])
    before = logits.clone()
    actual = processed_scores(logits, [row for _, row in batch])
    assert torch.equal(logits, before)
    unusable = unusable_rows(actual)
    for r, (row_logits, row) in enumerate(batch):
        expected = expected_scores(row_logits, row)
        if unusable_rows(expected[None]):
            # transformers goes on to sample from NaN; here the row is named.
            assert r in unusable
            continue
        if r in unusable:
            # Allowed ids that are barred stay barred; transformers lets them through again.
            assert row.sampling.allowed_ids
            continue
        assert torch.equal(actual[r].isneginf(), expected.isneginf())
        torch.testing.assert_close(
            actual[r].softmax(-1), expected.softmax(-1), rtol=1e-9, atol=1e-12
        )
        if not row.sampling.temperature:
            finite = ~expected.isneginf()
            torch.testing.assert_close(actual[r][finite], expected[finite], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", PROCESSORS)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_each_processor_alone(name: str, data: st.DataObject) -> None:
    assert_parity([data.draw(rows([name]))])


# The logits of one row on the edge of everything: ties at the k-th place and at top_p.
TIES = torch.tensor([0.0] * 6 + [1.0] * 6, dtype=torch.float64)


@settings(max_examples=600, deadline=None, derandomize=True)
@given(batches())
@example([(TIES, Row(SamplingParams(temperature=1.0, top_k=3), (0,)))])
@example([(TIES, Row(SamplingParams(temperature=1.0, top_k=VOCAB), (0,)))])
@example([(TIES, Row(SamplingParams(temperature=1.0, min_p=1.0), (0,)))])
@example([(TIES, Row(SamplingParams(repetition_penalty=2.0), (0, 7), (6, 7), 2))])
@example([(TIES - 1, Row(SamplingParams(repetition_penalty=2.0), (0, 7), (6, 7), 2))])
def test_random_combinations(batch: list[tuple[torch.Tensor, Row]]) -> None:
    assert_parity(batch)


# --- the whole of greedy decoding ---------------------------------------------------------------

TINY_VOCAB, EOS = 64, 3


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=TINY_VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=EOS,
    )
    return LlamaForCausalLM(config).eval()


GENERATED: dict[str, tuple[dict[str, Any], SamplingParams]] = {
    "nothing": ({}, SamplingParams()),
    "repetition_penalty": (
        {"repetition_penalty": 1.7},
        SamplingParams(repetition_penalty=1.7),
    ),
    "bad_words": (
        {"bad_words_ids": [[w] for w in range(20, 40)] + [[a, a] for a in range(64)]},
        SamplingParams(
            bad_words=(*((w,) for w in range(20, 40)), *((a, a) for a in range(64))),
        ),
    ),
    "min_tokens": (
        {"min_new_tokens": 12, "sequence_bias": [[[EOS], 30.0]]},
        SamplingParams(min_tokens=12, logit_bias=((EOS, 30.0),)),
    ),
    "banned_ids": (
        {"suppress_tokens": list(range(0, 64, 2))},
        SamplingParams(banned_ids=tuple(range(0, 64, 2))),
    ),
    "logit_bias": (
        {"sequence_bias": [[[5], 3.5], [[9], -2.0], [[EOS], -100.0]]},
        SamplingParams(logit_bias=((5, 3.5), (9, -2.0), (EOS, -100.0))),
    ),
    "everything": (
        {
            "repetition_penalty": 1.3,
            "bad_words_ids": [[7], [11, 12]],
            "min_new_tokens": 9,
            "suppress_tokens": [14, 15],
            "sequence_bias": [[[EOS], 4.0], [[2], 1.0]],
        },
        SamplingParams(
            repetition_penalty=1.3,
            bad_words=((7,), (11, 12)),
            min_tokens=9,
            banned_ids=(14, 15),
            logit_bias=((EOS, 4.0), (2, 1.0)),
        ),
    ),
}


@torch.inference_mode()
def chained(
    model: LlamaForCausalLM, prompt: list[int], sampling: SamplingParams, guess: list[int], k: int
) -> list[int]:
    """Our chain: k tokens of a guess, every third spoiled, verified on one forward's rows."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + 24 and EOS not in tokens[len(prompt) :]:
        done = len(tokens) - len(prompt)
        draft = [(t + (i % 3 == 0)) % 64 for i, t in enumerate(guess)][done : done + k]
        logits = model(torch.tensor([tokens + draft]), use_cache=False).logits[0]
        rows = [
            Row(sampling, tokens, draft[:i], len(prompt), frozenset({EOS}))
            for i in range(len(draft) + 1)
        ]
        committed = verify_chain(draft, target_tokens(logits[len(tokens) - 1 :], rows)).token_ids
        for token in committed:
            tokens.append(token)
            if token == EOS or len(tokens) == len(prompt) + 24:
                break
    return tokens[len(prompt) :]


@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("name", GENERATED)
def test_greedy_decoding_is_that_of_generate(model: LlamaForCausalLM, name: str, k: int) -> None:
    options, sampling = GENERATED[name]
    for prompt in ([1], [4, 9, 4, 9, 30], [7, 11, 2, 2, 61, 8]):
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=24,
            do_sample=False,
            use_cache=False,
            **options,
        )
        expected = output[0, len(prompt) :].tolist()
        assert chained(model, prompt, sampling, expected, k) == expected


def test_the_processors_above_change_the_text(model: LlamaForCausalLM) -> None:
    prompt = [4, 9, 4, 9, 30]
    plain = chained(model, prompt, SamplingParams(), [], 0)
    texts = [chained(model, prompt, sampling, [], 0) for _, sampling in GENERATED.values()]
    assert [text == plain for text in texts] == [name == "nothing" for name in GENERATED]
