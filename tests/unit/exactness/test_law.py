"""The law of the first tokens, against sampling by hand from transformers logits."""

import itertools
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.errors import ConfigError
from outrider.exactness.law import law_of, tempered
from outrider.exactness.reference import Reference, load_reference
from tests.support.models import EOS, TOKENS, VOCABULARY, plain_greedy, save_model

PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), scale=4.0)


@pytest.fixture(scope="module")
def reference(path: Path) -> Reference:
    return load_reference(str(path))


def test_reference_is_transformers_without_padding_ids(path: Path, reference: Reference) -> None:
    assert reference.token_count == TOKENS < VOCABULARY
    assert reference.greedy(PROMPT, 20) == plain_greedy(path, PROMPT, 20)
    module = AutoModelForCausalLM.from_pretrained(path).eval()
    with torch.inference_mode():
        expected = module(torch.tensor([PROMPT, [4, 5, 6]])).logits[:, -1, :TOKENS]
    logits = reference.logits([PROMPT, [4, 5, 6]])
    torch.testing.assert_close(logits, expected.double())
    best = expected[0].double().topk(2).values
    assert reference.margin(PROMPT) == pytest.approx(float(best[0] - best[1]))


def test_law_is_the_product_of_the_conditional_laws(reference: Reference) -> None:
    law = law_of(reference, PROMPT, 2, tempered(0.7))
    assert len(law) == TOKENS**2
    assert sum(law.values()) == pytest.approx(1.0)
    first = (reference.logits([PROMPT])[0] / 0.7).softmax(-1)
    for a, b in itertools.product((0, 17, 200), (3, 255)):
        second = (reference.logits([[*PROMPT, a]])[0] / 0.7).softmax(-1)
        assert law[a, b] == pytest.approx(float(first[a] * second[b]))


def test_unlikely_sequences_are_left_out(reference: Reference) -> None:
    whole = law_of(reference, PROMPT, 2, tempered(0.2))
    likely = law_of(reference, PROMPT, 2, tempered(0.2), least=1e-3)
    assert likely == {o: pytest.approx(p) for o, p in whole.items() if p >= 1e-3}
    assert 0 < len(likely) < len(whole)


def test_a_stop_id_ends_a_sequence(reference: Reference) -> None:
    law = law_of(reference, PROMPT, 2, tempered(1.0), stop_ids=frozenset({EOS, 7}))
    assert sum(law.values()) == pytest.approx(1.0)
    assert {outcome for outcome in law if len(outcome) == 1} == {(EOS,), (7,)}
    assert not any(outcome[0] in (EOS, 7) for outcome in law if len(outcome) == 2)


def test_what_can_not_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model at"):
        load_reference(str(tmp_path))
