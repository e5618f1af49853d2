"""How the parameters of a model are split over N ranks, from the model's own `tp_plan`.

    column      rows of the weight (outputs), and of its bias
    row         columns of the weight (inputs); the results are summed, the bias is rank 0's
    vocabulary  rows of the embedding and of the head, one slice of ids a rank
    replicated  all of it on every rank

Attention is split by whole heads, its keys and values by heads of their own; of those a rank
that would get less than one has a whole one, which others have too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from transformers import PreTrainedModel

from outrider.errors import UnsupportedModelError

# What the styles of transformers mean here. The head gathers its output where it is needed.
_COLUMN, _ROW = "colwise", "rowwise"
_HEAD, _EMBEDDING = "colwise_gather_output", "embedding_rowwise"
_REPLICATED = {"replicated_with_grad_allreduce"}
_KEY_VALUE = {"k_proj", "v_proj"}
_QUERY = {"q_proj", "o_proj", "dense"}
# Families whose product of queries, keys and values has its outputs head by head.
_FUSED_BY_HEAD = {"gpt_neox": "query_key_value"}


class Kind(StrEnum):
    """Along which dimension a parameter is split."""

    COLUMN = "column"
    ROW = "row"
    VOCABULARY = "vocabulary"
    REPLICATED = "replicated"


@dataclass(frozen=True, slots=True)
class Split:
    """How one module is split: `units` that stay whole, such as heads; 0 where nothing is."""

    kind: Kind
    units: int = 0

    def range(self, rank: int, size: int, length: int) -> tuple[int, int]:
        """[begin, end) of a rank along a dimension of that length."""
        if self.kind is Kind.REPLICATED:
            return 0, length
        if self.kind is Kind.VOCABULARY:
            return vocabulary_range(rank, size, length)
        unit = length // self.units
        # Of fewer units than ranks, neighbouring ranks share one.
        first = rank * self.units // size
        return first * unit, (first + max(self.units // size, 1)) * unit


@dataclass(frozen=True, slots=True)
class Figures:
    """What decides whether a model can be split over `ranks`."""

    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    ranks: int

    def __str__(self) -> str:
        return (
            f"{self.heads} heads, {self.kv_heads} KV heads, inner size {self.inner}, "
            f"vocabulary {self.vocabulary}, {self.ranks} ranks"
        )

    def obstacle(self) -> str:
        """Why it can't be split, or nothing."""
        if self.heads % self.ranks:
            return "the heads can't be shared out evenly"
        if self.kv_heads % self.ranks and self.ranks % self.kv_heads:
            return "the KV heads can neither be shared out evenly nor repeated evenly"
        if self.inner % self.ranks:
            return "the inner size can't be shared out evenly"
        if self.vocabulary <= (self.ranks - 1) * -(-self.vocabulary // self.ranks):
            return "a rank would have no part of the vocabulary"
        return ""


def vocabulary_range(rank: int, size: int, vocabulary: int) -> tuple[int, int]:
    """The ids [begin, end) of a rank; the last has fewer where they can't be shared evenly."""
    each = -(-vocabulary // size)
    return min(rank * each, vocabulary), min((rank + 1) * each, vocabulary)


def split_plan(module: PreTrainedModel, ranks: int) -> dict[str, Split]:
    """How each module with parameters is split, by its name; the others are replicated.

    `module` may be on the meta device.

    Raises:
        UnsupportedModelError: it can't be split so, with the figures or the layer.
    """
    untyped: Any = module
    config = untyped.config.get_text_config()
    plan: Mapping[str, str] = untyped._tp_plan or {}
    if not any(".layers." in name or ".h." in name for name in plan):
        raise UnsupportedModelError(
            f"{config.model_type} has no tensor-parallel plan in transformers: it can't be split "
            f"over {ranks} ranks"
        )
    heads = _size(config, "num_attention_heads", ranks)
    inner = _size(config, "intermediate_size", ranks)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    vocabulary, _ = untyped.get_input_embeddings().weight.shape
    figures = Figures(heads, kv_heads, inner, vocabulary, ranks)
    if why := figures.obstacle():
        raise UnsupportedModelError(f"{config.model_type} can't be split: {why} ({figures})")
    found: dict[str, Split] = {}
    for name, child in module.named_modules():
        style = plan.get(_wildcards(name))
        if style is None or style in _REPLICATED:
            continue
        found[name] = _split(untyped, name, child, style, figures)
    _require_head(untyped, found, figures)
    return found


def _size(config: Any, name: str, ranks: int) -> int:
    size = getattr(config, name, None)
    # Some families have one for each layer.
    if not isinstance(size, int) or size < 1:
        raise UnsupportedModelError(
            f"{config.model_type} can't be split over {ranks} ranks: its config has no single "
            f"{name} that layers could be cut by"
        )
    return size


def _split(model: Any, name: str, child: Any, style: str, figures: Figures) -> Split:
    if child is model.get_input_embeddings() or child is model.get_output_embeddings():
        if style in (_HEAD, _EMBEDDING):
            return Split(Kind.VOCABULARY, figures.vocabulary)
    elif style in (_COLUMN, _ROW) and type(child) is torch.nn.Linear:
        units = _units(model.config.get_text_config().model_type, name, figures)
        outputs, inputs = child.weight.shape
        if units and (outputs if style == _COLUMN else inputs) % units == 0:
            return Split(Kind.COLUMN if style == _COLUMN else Kind.ROW, units)
    raise UnsupportedModelError(
        f"{model.config.model_type} can't be split over {figures.ranks} ranks: {name} "
        f"({type(child).__name__}) is {style!r} in its plan, which is not supported for such a "
        "layer (fused products and experts are not split)"
    )


def _units(model_type: str, name: str, figures: Figures) -> int:
    """Of how many parts that stay whole a layer is made; 0 where that is not known."""
    *above, leaf = name.split(".")
    if (above and "attn" in above[-1]) or "attention" in above[-1]:
        if leaf in _KEY_VALUE:
            return figures.kv_heads
        fused = _FUSED_BY_HEAD.get(model_type) == leaf and figures.kv_heads == figures.heads
        return figures.heads if leaf in _QUERY or fused else 0
    # Gate and up in one product can't be cut in one place.
    return 0 if "gate_up" in leaf else figures.inner


def _require_head(model: Any, found: Mapping[str, Split], figures: Figures) -> None:
    by_module = {id(child): found.get(name) for name, child in model.named_modules()}
    for part in (model.get_input_embeddings(), model.get_output_embeddings()):
        if by_module.get(id(part)) is None:
            raise UnsupportedModelError(
                f"{model.config.model_type} can't be split over {figures.ranks} ranks: its plan "
                "does not split the embedding and the head"
            )


def _wildcards(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
