"""What is trained and what is run are the same network."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.drafting.draft_model import Fed
from outrider.drafting.trained import TrainedDraftModel
from outrider.model.blocks import BlockTable
from outrider.model.describe import describe
from outrider.model.draft_network import load_draft_network
from outrider.model.paged import Segment
from outrider.training.export import Target, save
from outrider.training.network import DraftNetwork, Shape, Texts
from tests.support.models import VOCABULARY, save_model

IDS = list(range(0, VOCABULARY, 3))
PROMPT, ANSWER = [5, 9, 2, 200, 30], [31, 7, 90, 8]


@pytest.mark.parametrize("reads_hidden", [True, False])
def test_states_are_those_of_the_training(tmp_path: Path, reads_hidden: bool) -> None:
    path = save_model(tmp_path / "target")
    model = AutoModelForCausalLM.from_pretrained(path)
    embeddings = model.get_input_embeddings().weight.detach()
    head = model.get_output_embeddings().weight.detach()[IDS]
    torch.manual_seed(0)
    shape = Shape(32, 64, 2, 1, 16, 2, 5000.0, 1e-5, 32, reads_hidden)
    trained = DraftNetwork(shape, embeddings, head).eval()
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            parameter.copy_((torch.randn(parameter.shape) * 0.3 + ("norm" in name)).half())
    target = Target(path, "target", describe(str(path)).fingerprint, VOCABULARY, 2, 256)
    save(tmp_path / "draft", trained, target, IDS, trained_with={})
    hidden = torch.randn(1, len(ANSWER), 32)
    texts = Texts(
        torch.tensor([PROMPT + ANSWER]),
        torch.ones(1, len(PROMPT), dtype=torch.bool),
        torch.ones(1, len(ANSWER), dtype=torch.bool),
        hidden,
    )
    with torch.no_grad():
        unrolled = trained.unroll(texts, 2 if reads_hidden else 1)
    network = load_draft_network(str(tmp_path / "draft"), str(path))
    run = TrainedDraftModel(network, total_blocks=2)
    table = BlockTable()
    run.pool.grow(table, 32)
    states = {len(PROMPT) + i: row for i, row in enumerate(hidden[0])}
    count = len(PROMPT) + len(ANSWER)
    output = run.forward([Fed(Segment(PROMPT + ANSWER, table, len(ANSWER)), states)])
    torch.testing.assert_close(output.hidden, unrolled[0][0], rtol=1e-3, atol=1e-3)
    expected = unrolled[0][0] @ head.T
    torch.testing.assert_close(output.logits, expected, rtol=1e-3, atol=1e-3)
    if reads_hidden:
        # The last token again, of the network's own state.
        table.kv_len = count - 1
        own = {0: output.hidden[-2].clone()}
        again = run.forward([Fed(Segment(ANSWER[-1:], table, 1), own)])
        torch.testing.assert_close(again.hidden[0], unrolled[1][0, -1], rtol=1e-3, atol=1e-3)
