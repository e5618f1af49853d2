import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.drafting.draft_model import Fed
from outrider.drafting.trained import TrainedDraftModel
from outrider.errors import ConfigError
from outrider.model.blocks import BlockTable
from outrider.model.draft_config import check_target, read_draft_config
from outrider.model.draft_network import load_draft_network
from outrider.model.numerics import FAST, FORWARDS, choose_numerics
from outrider.model.paged import Segment
from tests.support.draft_networks import FILE, ReferenceNetwork, save_draft_network
from tests.support.models import TOKENS, VOCABULARY, save_model

IDS = [*range(0, 100, 3), *range(120, 200), TOKENS, VOCABULARY - 1]
PROMPT = [5, 9, 2, 200, 30, 31, 7]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("targets") / "target")


def states(count: int, size: int = 32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return list(torch.randn(count, size, generator=generator))


def run(
    model: TrainedDraftModel, tokens: Sequence[int], known: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every row's logits and hidden states, in two steps."""
    table = BlockTable()
    model.pool.grow(table, len(tokens))
    logits, hidden = [], []
    for begin, end in ((0, 4), (4, len(tokens))):
        given = {r: s for r, s in enumerate(known[begin:end]) if s is not None}
        fed = Fed(Segment(tokens[begin:end], table, end - begin), given)
        output = model.forward([fed])
        logits.append(output.logits.clone())
        hidden.append(output.hidden.clone())
        table.kv_len = end
    return torch.cat(logits), torch.cat(hidden)


CASES: dict[str, dict[str, Any]] = {
    "reads": {},
    "reads, cut": {"ids": IDS},
    "plain": {"reads_hidden": False},
    "plain, cut": {"reads_hidden": False, "ids": IDS},
    "own tables": {"own_embeddings": True, "own_head": True, "ids": IDS},
    "own head": {"own_head": True},
}


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("case", CASES)
def test_logits_and_states_are_those_of_the_reference(
    target: Path, tmp_path: Path, case: str, forward: str
) -> None:
    path = save_draft_network(tmp_path / "draft", target, **CASES[case])
    reference = ReferenceNetwork(path, target)
    network = load_draft_network(str(path), str(target))
    numerics = choose_numerics(FAST, network.model, forward=forward)
    model = TrainedDraftModel(network, total_blocks=4, numerics=numerics)
    known: list[torch.Tensor | None] = [None, None, None, *states(3), None]
    logits, hidden = run(model, PROMPT, known)
    for row in range(len(PROMPT)):
        expected, state = reference.step(PROMPT[: row + 1], known[: row + 1])
        torch.testing.assert_close(logits[row], expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(hidden[row], state, rtol=1e-4, atol=1e-4)
    # The states make a difference, where they are read.
    without, _ = run(model, PROMPT, [None] * len(PROMPT))
    assert torch.allclose(without[-1], logits[-1]) == (not case.startswith(("reads", "own")))


def test_columns_of_a_cut_head_and_ids(target: Path, tmp_path: Path) -> None:
    path = save_draft_network(tmp_path / "draft", target, ids=IDS)
    network = load_draft_network(str(path), str(target))
    head = TrainedDraftModel(network, total_blocks=1, token_count=TOKENS).head
    assert head.ids(range(len(IDS))) == IDS
    usable = head.usable(torch.arange(float(len(IDS)))[None])
    # Two of the ids are padding of the target's.
    assert usable.shape == (1, len(IDS) - 2)
    wide = head.widened(usable)
    assert wide.shape == (1, TOKENS)
    assert wide[0, IDS[:-2]].tolist() == list(range(len(IDS) - 2))
    assert int(wide.isneginf().sum()) == TOKENS - len(IDS) + 2


def test_weights_are_converted_and_the_embeddings_kept_as_they_are(
    target: Path, tmp_path: Path
) -> None:
    path = save_draft_network(tmp_path / "draft", target, own_embeddings=True)
    tensors = load_file(path / FILE)
    narrow = {n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors.items()}
    save_file(narrow, path / FILE)
    network = load_draft_network(str(path), str(target))
    assert {p.dtype for p in network.model.module.parameters()} == {torch.float32}
    assert network.embeddings.dtype == torch.bfloat16
    assert network.inputs([1, 2], {}).dtype == torch.float32
    # The target's are not read a second time into a table of the module's own.
    assert network.model.module.get_input_embeddings().weight.shape[0] == 1
    assert network.model.vocab_size == VOCABULARY


def test_another_target_is_refused_with_both_names(target: Path, tmp_path: Path) -> None:
    path = str(save_draft_network(tmp_path / "draft", target))
    stranger = save_model(tmp_path / "stranger", seed=8)
    config = json.loads((stranger / "config.json").read_text())
    (stranger / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ConfigError, match=r"trained for target, of 2 .* is stranger, of 3 and 32"):
        load_draft_network(path, str(stranger))
    with pytest.raises(ConfigError, match="give --target, the directory of target"):
        load_draft_network(path, "")
    with pytest.raises(ConfigError, match="no drafter that was trained"):
        load_draft_network(str(target), str(target))


def test_another_checkpoint_of_the_same_sizes_is_warned_of(target: Path, tmp_path: Path) -> None:
    path = str(save_draft_network(tmp_path / "draft", target))
    draft = read_draft_config(path)
    assert draft is not None
    assert check_target(path, draft, str(target)) == ""
    tuned = str(save_model(tmp_path / "tuned", seed=8))
    assert "drafts may be poorer" in check_target(path, draft, tuned)
    assert load_draft_network(path, tuned).fuse is not None


def test_one_with_tables_of_its_own_needs_no_target(target: Path, tmp_path: Path) -> None:
    path = str(save_draft_network(tmp_path / "draft", target, own_embeddings=True, own_head=True))
    assert load_draft_network(path, "").fuse is not None


@pytest.mark.parametrize(
    ("name", "replacement", "message"),
    [
        ("d2t", lambda t: t + 1, "do not name the same ids"),
        ("t2d", lambda t: t[1:], "t2d of .* has the shape"),
        ("missing", lambda t: t[1:], "missing of .* has the shape"),
        ("fuse.weight", lambda t: None, "no tensor fuse.weight"),
        ("model.norm.weight", lambda t: None, "no tensor model.norm.weight"),
        ("model.layers.0.mlp.up_proj.weight", lambda t: t[1:], "up_proj.weight of .* has"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    target: Path, tmp_path: Path, name: str, replacement: Any, message: str
) -> None:
    path = save_draft_network(tmp_path / "draft", target, ids=IDS)
    tensors = load_file(path / FILE)
    changed = replacement(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed.contiguous()
    save_file(tensors, path / FILE)
    with pytest.raises(ConfigError, match=message):
        load_draft_network(str(path), str(target))


def test_configs(target: Path, tmp_path: Path) -> None:
    assert read_draft_config(str(target)) is None
    assert read_draft_config(str(tmp_path / "model.gguf")) is None
    path = save_draft_network(tmp_path / "draft", target)
    draft = read_draft_config(str(path))
    assert draft is not None
    assert (draft.target, draft.target_layers, draft.target_hidden) == ("target", 2, 32)
    check_target(str(path), draft, str(target))
    config = json.loads((path / "config.json").read_text())
    for wrong in ("2", None, True, 2.0):
        config["outrider_draft"]["target_layers"] = wrong
        (path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ConfigError, match="target_layers has to be of type int"):
            read_draft_config(str(path))
