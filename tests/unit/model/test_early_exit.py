from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.drafting.base import DraftRequest
from outrider.drafting.draft_model import PlainDraftModel
from outrider.drafting.model import ModelDrafter
from outrider.errors import ConfigError
from outrider.messages import SamplingParams
from outrider.model.early_exit import first_layers
from outrider.model.loading import load_model
from outrider.model.numerics import FAST, choose_numerics
from tests.support.models import FAMILIES, VOCABULARY, save_model

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp(request.param), request.param)


@torch.inference_mode()
def greedy_by_one_layer(path: Path, prompt: list[int], count: int) -> tuple[int, ...]:
    """What transformers says with a config of one layer: the rest of the weights is not read."""
    config = AutoConfig.from_pretrained(path)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    model = AutoModelForCausalLM.from_pretrained(path, config=config).eval()
    tokens = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tuple(tokens[len(prompt) :])


def test_it_drafts_as_the_first_layer_with_the_last_norm_and_head(path: Path) -> None:
    whole = load_model(str(path))
    name, fingerprint = whole.name, whole.fingerprint
    model = first_layers(whole, 1)
    assert model.name == f"{name}-first-1"
    assert model.fingerprint != fingerprint
    drafter = ModelDrafter(
        PlainDraftModel(model, total_blocks=8, numerics=choose_numerics(FAST, model))
    )
    drafter.open("s", PROMPT, SamplingParams())
    (draft,) = drafter.propose([DraftRequest("s", 6)])
    assert draft is not None
    assert draft.token_ids == greedy_by_one_layer(path, PROMPT, 6)
    assert max(draft.token_ids) < VOCABULARY


@pytest.mark.parametrize("count", [0, 2, 3])
def test_some_layers_have_to_be_left_out_and_some_kept(path: Path, count: int) -> None:
    with pytest.raises(ConfigError, match="has 2 layers; use the first 1 to 1"):
        first_layers(load_model(str(path)), count)
