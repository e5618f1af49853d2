"""A tiny target and texts of its own."""

from pathlib import Path

import pytest
import torch

from outrider.model.loading import LoadedModel, load_model
from outrider.model.numerics import FAST, choose_numerics
from outrider.model.paged import PagedModel
from outrider.training.corpus import Example
from outrider.training.network import DraftNetwork
from outrider.training.prompts import answered
from outrider.training.start import shape_of
from outrider.training.writing import Writer, blocks_needed
from tests.support.models import TOKENS, save_model

PROMPTS = [[7, 3, 9], [11] * 20, [5, 6, 5, 6, 5], [200, 100, 50, 25, 12, 6]]


@pytest.fixture(scope="session")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("target"), "qwen3")


@pytest.fixture(scope="session")
def target(target_path: Path) -> LoadedModel:
    return load_model(str(target_path))


@pytest.fixture(scope="session")
def examples(target_path: Path) -> list[Example]:
    model = load_model(str(target_path))
    paged = PagedModel(model, blocks_needed(4, 64), choose_numerics(FAST, model))
    scripts = (
        answered(index, prompt, max_tokens=14, stop_ids=frozenset())
        for index, prompt in enumerate(PROMPTS)
    )
    found = list(Writer(paged, TOKENS, seats=3, step_tokens=8).run(scripts))
    return sorted(found, key=lambda example: example.index)


@pytest.fixture
def network(target: LoadedModel) -> DraftNetwork:
    """Two layers that read hidden states, random, with a head of every other id."""
    torch.manual_seed(3)
    module = target.module
    shape = shape_of(module.config, layers=2, reads_hidden=True)
    head = module.get_output_embeddings().weight.detach()[:TOKENS:2].clone()
    embeddings = module.get_input_embeddings().weight.detach()
    network = DraftNetwork(shape, embeddings, head)
    with torch.no_grad():
        network.missing.normal_()
    return network
