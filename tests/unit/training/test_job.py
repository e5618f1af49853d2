"""A whole training, from a target to a directory that says what it is."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.errors import ConfigError
from outrider.training.corpus import Corpus
from outrider.training.job import Order, train

PROMPTS = [f"{letter}{digit}{letter}" * 3 for letter in "abcdefgh" for digit in range(10)]


class Quiet:
    """Shows nothing."""

    def stage(self, total: int) -> Any:
        return nullcontext()

    def show(self, what: str, done: int, *, seconds_left: float | None = None) -> None:
        pass


@pytest.fixture
def order(target_path: Path, tmp_path: Path) -> Order:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    return Order(
        target=str(target_path), out=tmp_path / "out", texts=tmp_path / "texts",
        prompts=(str(prompts),), examples=80, max_tokens=12, most_prompt=40, seats=8,
        from_target=True, from_draft=None, config=None, layers=1, reads_hidden=True,
        head_ids=200, steps=60,
        batch_tokens=200, rate=3e-3, tv=0.0, dropout=0.0, unroll=2, draft_len=3, look_every=20,
        held_out=8, seed=0, threads=1, command="outrider train …",
    )  # fmt: skip


def test_acceptance_rises_and_the_loss_falls(order: Order) -> None:
    found = train(replace(order, reads_hidden=False, steps=80), Quiet())
    report = json.loads((order.out / "report.json").read_text())
    assert report["held_out"]["mean_acceptance_length"] == found.mean_length
    losses = report["losses"]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    assert report["looks"][-1][1] > report["looks"][0][1]
    assert (order.out / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert f"**{found.mean_length:.2f}**" in (order.out / "README.md").read_text()


@pytest.mark.parametrize("reads_hidden", [True, False])
def test_the_directory_has_what_a_drafter_needs(order: Order, reads_hidden: bool) -> None:
    train(replace(order, steps=2, reads_hidden=reads_hidden), Quiet())
    config = json.loads((order.out / "config.json").read_text())
    assert config["outrider_draft"]["reads_hidden"] is reads_hidden
    assert config["outrider_draft"]["target_layers"] == 2
    tensors = load_file(order.out / "model.safetensors")
    assert ("fuse.weight" in tensors) is reads_hidden
    ids = torch.arange(config["vocab_size"]) + tensors["d2t"]
    assert tensors["t2d"].nonzero().flatten().tolist() == ids.tolist()
    assert tensors["model.layers.0.mlp.up_proj.weight"].shape == (64, 32)
    assert (order.out / "tokenizer.json").exists()


def test_a_training_that_is_repeated_is_the_same(order: Order, tmp_path: Path) -> None:
    def losses(order: Order) -> tuple[list[float], str]:
        train(order, Quiet())
        report = json.loads((order.out / "report.json").read_text())
        return report["losses"], report["about"]["texts_sha256"]

    first = losses(replace(order, steps=6))
    again = losses(replace(order, steps=6, seats=3, out=tmp_path / "o2", texts=tmp_path / "t2"))
    assert first == again


def test_a_draft_model_goes_on_from_another(order: Order, tmp_path: Path) -> None:
    train(order, Quiet())
    more = replace(order, out=tmp_path / "more", from_draft=order.out, seed=1, steps=2, rate=0.0)
    with pytest.raises(ConfigError, match="written with seed 0, not 1"):
        train(more, Quiet())
    train(replace(more, seed=0), Quiet())
    before, after = (load_file(d / "model.safetensors") for d in (order.out, more.out))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, atol=1e-3, rtol=1e-3)


def test_what_is_no_draft_model_is_refused(order: Order, target_path: Path) -> None:
    with pytest.raises(ConfigError, match="no draft model that"):
        train(replace(order, from_draft=target_path), Quiet())
    train(replace(order, steps=1), Quiet())
    longer = replace(order, out=order.out.with_name("two"), from_draft=order.out, layers=2)
    with pytest.raises(ConfigError, match="of another shape"):
        train(longer, Quiet())


def test_text_files_are_learned_from(order: Order, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    train(replace(order, prompts=(), text=(str(text),), examples=50, steps=4), Quiet())
    found = list(Corpus(order.texts, 32))
    assert len(found) == 50
    assert all(example.prompt_len == 1 for example in found)


def test_a_target_without_a_chat_template_invents_nothing(
    order: Order, target_path: Path, tmp_path: Path
) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    for file in target_path.iterdir():
        if file.name != "chat_template.jinja":
            (plain / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ConfigError, match="--prompts, or text with --text"):
        train(replace(order, target=str(plain), prompts=()), Quiet())


def test_invented_prompts_go_on_where_they_were(order: Order) -> None:
    few = replace(order, prompts=(), examples=44, max_tokens=4, steps=1)
    train(few, Quiet())
    before = {example.index: example.token_ids for example in Corpus(order.texts, 32)}
    train(replace(few, examples=50, out=order.out.with_name("more")), Quiet())
    after = {example.index: example.token_ids for example in Corpus(order.texts, 32)}
    assert set(after) == set(range(50))
    assert {index: after[index] for index in before} == before


@pytest.mark.parametrize("line", ["{}", "not json", '{"turns": []}', '{"messages": "x"}'])
def test_a_line_that_is_no_prompt_is_named(order: Order, tmp_path: Path, line: str) -> None:
    prompts = tmp_path / "bad.jsonl"
    prompts.write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"bad.jsonl:2"):
        train(replace(order, prompts=(str(prompts),)), Quiet())
