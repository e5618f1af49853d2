"""A linear layer whose weight stays where it was read from, in few bits, until it is laid out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from outrider.model.linears.int4 import GROUP, OUTPUTS, Quantised

# Outputs whose weights are unpacked at a time.
_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [N, K] of `bits` bits, which `read` brings into memory."""

    outputs: int
    columns: int
    bits: int
    read: Callable[[], Quantised]


class QuantisedLinear(torch.nn.Linear):
    """A linear layer over a packed weight: slow, for a model's own forward before it is packed.

    It holds no weight; whoever asks for it gets an unpacked copy.
    """

    def __init__(
        self, packed: PackedWeight, bias: torch.nn.Parameter | None, dtype: torch.dtype
    ) -> None:
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = packed.columns, packed.outputs
        self.bias = bias  # type: ignore[assignment]  # torch says that there is always one
        self.bits = packed.bits
        self._packed = packed
        self.dtype = dtype

    @property
    def integers(self) -> Quantised:
        """The weight, read anew."""
        return self._packed.read()

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]  # an attribute there
        """The unpacked weight [N, K], made anew."""
        return self.integers.dense().to(self.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X [..., K] to [..., N], a part of the outputs at a time."""
        if x.is_meta:
            return x.new_empty(*x.shape[:-1], self.out_features)
        whole = self.integers
        parts = [
            functional.linear(x, whole.rows(slice(begin, begin + _CHUNK)).dense().to(x.dtype))
            for begin in range(0, self.out_features, _CHUNK)
        ]
        result = torch.cat(parts, -1)
        return result if self.bias is None else result.add_(self.bias)


class OwnIntegers:
    """`QuantisedWeights` of a model whose layers know their own."""

    def find(self, linear: torch.nn.Module) -> Quantised | None:
        """Those of a `QuantisedLinear`; None for any other."""
        return linear.integers if isinstance(linear, QuantisedLinear) else None


@dataclass(slots=True)
class Weigher:
    """What the products of packed layers take; nothing is read or made.

    `kept_bytes` are those of the products. `second_bytes` are at most kept beside them, where
    unpacking is measured to be quicker for many rows.
    """

    itemsize: int
    kept_bytes: int = 0
    second_bytes: int = 0

    def fuse(self, linears: Sequence[torch.nn.Module]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Count one product; layers that are no `QuantisedLinear` are counted elsewhere."""
        packed = [one for one in linears if isinstance(one, QuantisedLinear)]
        alike = len(packed) == len(linears) and len({one.bits for one in packed}) == 1
        outputs = sum(one.out_features for one in packed)
        if alike and outputs % OUTPUTS == 0:
            numbers = outputs * packed[0].in_features
            # A Q8_0 weight is two of four bits. Scale and zero are bfloat16, or float32 beside
            # integers of a byte.
            self.kept_bytes += (packed[0].bits // 4) * (numbers // 2 + 4 * numbers // GROUP)
            self.second_bytes += numbers + 8 * numbers // GROUP
        else:
            self.kept_bytes += self.itemsize * sum(o.out_features * o.in_features for o in packed)
        return _nothing


def _nothing(x: torch.Tensor) -> torch.Tensor:
    raise AssertionError("a product that was only weighed")
