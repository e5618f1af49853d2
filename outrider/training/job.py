"""A whole training, from the target to the directory of a draft model."""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from outrider import __version__
from outrider.errors import ConfigError
from outrider.model.loading import LoadedModel, load_model
from outrider.model.numerics import FAST, choose_numerics
from outrider.model.paged import PagedModel
from outrider.model.parts import parts_of
from outrider.model.tokenizers import Tokenizer, load_tokenizer, producible_ids
from outrider.training import start
from outrider.training.acceptance import Acceptance
from outrider.training.corpus import Corpus, Example, digest_of
from outrider.training.export import Target, save, write_report
from outrider.training.losses import Weights
from outrider.training.network import DraftNetwork
from outrider.training.run import Glance, Plan, Run
from outrider.training.sources import WINDOW, Source, scripts, windows
from outrider.training.writing import Writer, blocks_needed

# One text in so many is held out; of few texts more.
_HELD_OUT_SHARE = 40
_HELD_OUT_SHARE_OF_FEW = 10
_FEW = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to be trained; see the flags of `outrider train`."""

    target: str
    out: Path
    texts: Path
    prompts: tuple[str, ...] = ()
    text: tuple[str, ...] = ()
    examples: int
    max_tokens: int
    most_prompt: int
    seats: int
    from_target: bool
    from_draft: Path | None
    config: Path | None
    layers: int
    reads_hidden: bool
    head_ids: int
    steps: int
    batch_tokens: int
    rate: float
    tv: float
    dropout: float
    unroll: int
    draft_len: int
    look_every: int
    held_out: int
    seed: int
    threads: int
    command: str


class Stages(Protocol):
    """Shows how far the work is."""

    def stage(self, total: int) -> AbstractContextManager[None]:
        """Begin a part of the work, of so many units."""

    def show(self, what: str, done: int, *, seconds_left: float | None = None) -> None:
        """How far it is."""


def train(order: Order, stages: Stages) -> Acceptance:
    """Write the texts, train on them and write the draft model; goes on where it was ended.

    Raises:
        ConfigError: a file or a setting is wrong, or what is there is of other settings.
        UnsupportedModelError: the target can't be run here.
    """
    if order.threads:
        torch.set_num_threads(order.threads)
    torch.manual_seed(order.seed)
    source = Source(order.prompts, order.text)
    tokenizer = load_tokenizer(order.target)
    corpus = _write(order, source, tokenizer, stages)
    # The order in which texts end depends on how many are written at once.
    written = sorted(corpus, key=lambda example: example.index)
    examples = [e for e in written if e.index < order.examples and len(e.answer) > 1]
    share = _HELD_OUT_SHARE_OF_FEW if order.examples < _FEW else _HELD_OUT_SHARE
    held_out = [e for e in examples if e.index % share == 0][: order.held_out]
    learned = [e for e in examples if e.index % share]

    # Loaded anew: what ran above may have taken the weights out of its modules.
    model = load_model(order.target)
    config: Any = model.module.config.get_text_config()
    ids = _head_ids(order, learned, producible_ids(tokenizer, model.vocab_size))
    network, norm_weight = _network(order, model, ids, learned)
    target = Target(
        Path(order.target),
        model.name,
        model.fingerprint,
        model.vocab_size,
        config.num_hidden_layers,
        model.context_len,
    )
    del model
    plan = Plan(
        steps=order.steps,
        seed=order.seed,
        rate=order.rate,
        batch_tokens=order.batch_tokens,
        weights=Weights(tv=order.tv),
        unroll=order.unroll,
        look_every=order.look_every,
        draft_len=order.draft_len,
    )
    order.out.mkdir(parents=True, exist_ok=True)
    run = Run(
        network,
        plan,
        order.out,
        draft_ids=start.positions_of(ids, target.vocab_size),
        norm_weight=norm_weight,
    )
    run.resume()

    def show(glance: Glance) -> None:
        what = (
            f"step {glance.step}/{glance.steps}, loss {glance.loss:.3f}, "
            f"mean acceptance length {glance.mean_length:.2f}"
        )
        stages.show(what, glance.step, seconds_left=glance.seconds_left)

    with stages.stage(order.steps):
        found = run.train(learned, held_out, show)
    about = {
        "target": target.name,
        "command": order.command,
        "version": __version__,
        "reads_hidden": order.reads_hidden,
        "parameters": sum(p.numel() for p in network.parameters()),
        "head_ids": len(ids),
        "texts": len(learned),
        "text_tokens": sum(len(example.answer) for example in learned),
        "source": source.name,
        "texts_sha256": digest_of(examples),
        "seed": order.seed,
        "steps": order.steps,
        "threads": torch.get_num_threads(),
        "held_out_texts": len(held_out),
    }
    save(order.out, network, target, ids, trained_with=about)
    write_report(order.out, run.history, found, about=about)
    return found


def _write(order: Order, source: Source, tokenizer: Tokenizer, stages: Stages) -> Corpus:
    """Have the target write what is not written yet."""
    model = load_model(order.target)
    config: Any = model.module.config.get_text_config()
    about = {
        "target": model.fingerprint,
        "source": source.name,
        "max_tokens": order.max_tokens,
        "most_prompt": order.most_prompt,
        "seed": order.seed,
    }
    corpus = Corpus.open(order.texts, config.hidden_size, about)
    known = {example.index for example in corpus}
    with stages.stage(order.examples):
        for done, example in enumerate(
            _written(order, source, tokenizer, model, known), len(known) + 1
        ):
            corpus.add(example)
            stages.show(f"text {done}/{order.examples}", done)
    return corpus


def _written(
    order: Order, source: Source, tokenizer: Tokenizer, model: LoadedModel, known: set[int]
) -> Iterator[Example]:
    room = min(order.most_prompt + order.max_tokens, model.context_len)
    if order.max_tokens >= model.context_len:
        raise ConfigError(
            f"--max-tokens {order.max_tokens} leaves no room for a prompt in the context of "
            f"{model.context_len}"
        )
    blocks = blocks_needed(order.seats, max(room, WINDOW))
    paged = PagedModel(model, blocks, choose_numerics(FAST, model))
    if source.texts:
        yield from windows(source, tokenizer, paged, known=known, count=order.examples)
        return
    writer = Writer(paged, producible_ids(tokenizer, model.vocab_size), seats=order.seats)
    yield from writer.run(
        scripts(
            source,
            tokenizer,
            known=known,
            count=order.examples,
            seed=order.seed,
            max_tokens=order.max_tokens,
            most_prompt=room - order.max_tokens,
            stop_ids=model.stop_ids,
        )
    )


def _network(
    order: Order, model: LoadedModel, ids: list[int], learned: list[Example]
) -> tuple[DraftNetwork, torch.Tensor]:
    """The network to begin with, and the weight of the target's last norm."""
    module: Any = model.module
    shape = start.shape_of(module.config, layers=order.layers, reads_hidden=order.reads_hidden)
    if order.config is not None:
        try:
            shape = start.shape_from(json.loads(order.config.read_text()), shape)
        except (OSError, ValueError) as error:
            raise ConfigError(f"can't read {order.config}: {error}") from error
    embeddings = module.get_input_embeddings().weight.detach().float()
    head = module.get_output_embeddings().weight.detach()[torch.tensor(ids)].float()
    network = DraftNetwork(shape, embeddings, head, dropout=order.dropout)
    parts = parts_of(model.module)
    norm_weight = torch.ones(shape.target_hidden)
    if parts is not None:
        norm_weight = parts.norm.weight.detach().float()
    if order.from_target and order.config is None and parts is not None:
        layers = list(module.model.layers)
        # What reads the last state goes on from there; what reads embeddings begins there.
        chosen = layers[-order.layers :] if order.reads_hidden else layers[: order.layers]
        start.copy_layers(network, chosen)
        with torch.no_grad():
            network.norm.weight.copy_(norm_weight)
    if order.from_draft is not None:
        start.copy_draft(network, order.from_draft)
    elif order.reads_hidden:
        start.least_squares(network, learned, norm_weight)
    return network, norm_weight


def _head_ids(order: Order, learned: list[Example], producible: int) -> list[int]:
    if order.from_draft is not None:
        return start.draft_ids(order.from_draft)
    return start.frequent_ids(learned, order.head_ids, producible)
