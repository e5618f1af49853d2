"""Put the linears that suit this machine into a model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers.pytorch_utils import Conv1D

from outrider.errors import InternalError
from outrider.model.linears.choice import Choice, choose_kind
from outrider.model.linears.int4 import (
    Quantised,
    concatenated,
    make_int4,
    rows_to_unpack,
    supported,
)
from outrider.model.linears.kinds import DENSE, KINDS, Kind, Linear
from outrider.model.linears.packed import QuantisedLinear

_LINEAR_TYPES = (torch.nn.Linear, Conv1D, QuantisedLinear)


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
        if isinstance(linear, QuantisedLinear):
            return  # it has none
        if self.release and not any(linear.weight is kept for kept in self.kept):
            linear.weight.data = _no_weight(linear)

    def leaves_plain(self, linear: torch.nn.Module) -> bool:
        """Whether the plain layer is the best there is."""
        if self.quantised is not None and self.quantised.find(linear) is not None:
            return False
        return self._kind(_weight(linear)) is DENSE

    def _make(self, linears: Sequence[torch.nn.Module]) -> Linear:
        packed = self._packed(linears)
        if packed is not None:
            shape = tuple(packed.integers.shape)
            if shape not in self._many_rows:
                self._many_rows[shape] = rows_to_unpack(packed)
            return make_int4(packed, _joined_bias(linears), self._many_rows[shape])
        weights = [_weight(linear) for linear in linears]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        return self._kind(weight).make(weight, _joined_bias(linears))

    def _packed(self, linears: Sequence[torch.nn.Module]) -> Quantised | None:
        """The integers of layers side by side; None where they are not all alike."""
        if self.quantised is None:
            return None
        found: list[Quantised] = []
        for linear in linears:
            one = self.quantised.find(linear)
            if one is None:
                return None
            found.append(one)
        packed = found[0] if len(found) == 1 else concatenated(found)
        device = next((p.device for p in linears[0].parameters()), torch.device("cpu"))
        return packed if packed is not None and supported(packed, device) else None

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
        packed = isinstance(replaced, QuantisedLinear)
        self.weight: torch.Tensor = _no_weight(replaced) if packed else replaced.weight

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


def require_weights(module: torch.nn.Module) -> None:
    """Refuse a model whose weights were laid out anew for another forward, and given back.

    Raises:
        InternalError: it has to be loaded again.
    """
    for name, child in module.named_modules():
        if type(child) in _LINEAR_TYPES:
            _require_weight(child, name)


def _weight(linear: Any) -> torch.Tensor:
    """As [N, K]."""
    _require_weight(linear, type(linear).__name__)
    weight: torch.Tensor = linear.weight.detach()
    return weight.t() if isinstance(linear, Conv1D) else weight


def _require_weight(linear: Any, name: str) -> None:
    if not isinstance(linear, QuantisedLinear) and not any(linear.weight.stride()):
        raise InternalError(
            f"the weight of {name} was laid out for another forward and is gone: load the model "
            "again for this one"
        )


def _no_weight(linear: Any) -> torch.Tensor:
    """What looks like the weight of a layer and has no memory."""
    if isinstance(linear, QuantisedLinear):
        return torch.empty((), dtype=linear.dtype).expand(linear.out_features, linear.in_features)
    weight: torch.Tensor = linear.weight
    return weight.new_empty(()).expand(weight.shape)


def _joined_bias(linears: Sequence[Any]) -> torch.Tensor | None:
    biases = [None if linear.bias is None else linear.bias.detach() for linear in linears]
    some = next((bias for bias in biases if bias is not None), None)
    if some is None:
        return None
    return torch.cat(
        [
            some.new_zeros(linear.nf if isinstance(linear, Conv1D) else linear.out_features)
            if bias is None
            else bias
            for linear, bias in zip(linears, biases, strict=True)
        ]
    )
