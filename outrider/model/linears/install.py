"""Put the linears that suit this machine into a model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers.pytorch_utils import Conv1D

from outrider.model.linears.choice import Choice, choose_kind
from outrider.model.linears.int4 import (
    Quantised,
    concatenated,
    make_int4,
    rows_to_unpack,
    supported,
)
from outrider.model.linears.kinds import DENSE, KINDS, Kind, Linear

_LINEAR_TYPES = (torch.nn.Linear, Conv1D)


class QuantisedWeights(Protocol):
    """Where the integers of quantised layers come from; `outrider.model.gguf.GgufWeights`."""

    def find(self, linear: torch.nn.Module) -> Quantised | None:
        """Those of a layer; None when it has none."""
        ...


@dataclass(slots=True)
class Packer:
    """Makes linears of the kinds that are quickest here, one measurement for each shape.

    A layer that `quantised` knows stays packed. With `release`, a weight is taken out of its
    module once it is laid out anew, so that it is in memory once; `kept` are weights that
    something else still reads, such as an embedding that is also the head.
    """

    kinds: Sequence[Kind] = KINDS
    quantised: QuantisedWeights | None = None
    release: bool = True
    kept: Sequence[torch.Tensor] = ()
    choices: dict[tuple[int, ...], Choice] = field(default_factory=dict)
    _many_rows: dict[tuple[int, ...], int] = field(default_factory=dict)

    def fuse(self, linears: Sequence[torch.nn.Module]) -> Linear:
        """One product for layers that read the same rows: their results side by side."""
        product = self._make(linears)
        for linear in linears:
            self.take_out(linear)
        return product

    def take_out(self, linear: Any) -> None:
        """Free the weight of a layer that is laid out anew, unless something else reads it."""
        if self.release and not any(linear.weight is kept for kept in self.kept):
            linear.weight.data = linear.weight.new_empty(()).expand(linear.weight.shape)

    def leaves_plain(self, linear: torch.nn.Module) -> bool:
        """Whether the plain layer is the best there is."""
        if self.quantised is not None and self.quantised.find(linear) is not None:
            return False
        return self._kind(_weight(linear)) is DENSE

    def _make(self, linears: Sequence[torch.nn.Module]) -> Linear:
        weights = [_weight(linear) for linear in linears]
        bias = _joined_bias(linears, weights)
        if self.quantised is not None:
            found = [self.quantised.find(linear) for linear in linears]
            packed = concatenated([one for one in found if one is not None])
            if None not in found and packed is not None and supported(packed, weights[0].device):
                shape = tuple(packed.integers.shape)
                if shape not in self._many_rows:
                    self._many_rows[shape] = rows_to_unpack(packed)
                return make_int4(packed, bias, self._many_rows[shape])
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        return self._kind(weight).make(weight, bias)

    def _kind(self, weight: torch.Tensor) -> Kind:
        shape = tuple(weight.shape)
        if shape not in self.choices:
            self.choices[shape] = choose_kind(weight, self.kinds)
        return self.choices[shape].kind


class PackedLinear(torch.nn.Module):
    """A laid out weight in the place of a linear layer: [..., K] to [..., N]."""

    def __init__(self, product: Linear, replaced: Any) -> None:
        super().__init__()
        self._product = product
        # Models ask their layers for the type of the weight, if for anything.
        self.weight: torch.Tensor = replaced.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product of every row."""
        return self._product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


def pack_module(module: torch.nn.Module, packer: Packer) -> None:
    """Replace the linear layers in `module` for which another kind than the plain is better."""
    found = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if type(child) in _LINEAR_TYPES
    ]
    for parent, name, child in found:
        if not packer.leaves_plain(child):
            setattr(parent, name, PackedLinear(packer.fuse([child]), child))


def _weight(linear: Any) -> torch.Tensor:
    """As [N, K]."""
    weight: torch.Tensor = linear.weight.detach()
    return weight.t() if isinstance(linear, Conv1D) else weight


def _joined_bias(linears: Sequence[Any], weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    biases = [None if linear.bias is None else linear.bias.detach() for linear in linears]
    if all(bias is None for bias in biases):
        return None
    return torch.cat(
        [
            weight.new_zeros(len(weight)) if bias is None else bias
            for weight, bias in zip(weights, biases, strict=True)
        ]
    )
