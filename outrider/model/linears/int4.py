"""Linear layers over the 4- and 8-bit weights of a GGUF file, kept packed.

A GGUF block has 32 weights and their own scale d, with a minimum m in Q4_1:

    Q4_0  w = d (q - 8)          q in 0..15
    Q4_1  w = d q + m            q in 0..15
    Q8_0  w = d q                q in -128..127

The kernel of torch (`_weight_int4pack_mm_for_cpu`) computes w = s (q - 8) + z for groups of 32
with bfloat16 s and z, so the integers of the file go in as they are: nothing is quantised a
second time. Scales are rounded to bfloat16, and so are the rows that are multiplied. A Q8_0
weight is two of them, its high and its low four bits: q = 16 h + l.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch.nn import functional

from outrider.model.linears.kinds import Linear

GROUP = 32
# Outputs of a product are a multiple of this.
OUTPUTS = 16
# What can stay packed, with the bits of a number.
TYPES = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
# Rows from which on unpacking the weight first may be quicker; what is measured at load.
_MANY_ROWS = (64, 128, 256)
# Outputs that are unpacked at a time.
_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class Quantised:
    """The weight [N, K] of a GGUF tensor: integers and, by group of 32, scale and minimum.

    `integers` [N, K] int8; `scale` and `minimum` [N, K / 32] float32: w = scale * q + minimum.
    """

    integers: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor
    bits: int

    @classmethod
    def read(cls, kind: str, data: np.ndarray) -> Self:
        """From the bytes of a tensor, uint8 [N, bytes of a row], of one of `TYPES`."""
        rows = torch.from_numpy(data.copy())
        if kind == "Q8_0":
            blocks = rows.view(len(rows), -1, 2 + GROUP)
            scale = _half(blocks[..., :2])
            integers = blocks[..., 2:].contiguous().view(torch.int8)
            return cls(integers.flatten(1), scale, torch.zeros_like(scale), 8)
        header = {"Q4_0": 2, "Q4_1": 4}[kind]
        blocks = rows.view(len(rows), -1, header + GROUP // 2)
        scale = _half(blocks[..., :2])
        minimum = _half(blocks[..., 2:4]) if kind == "Q4_1" else -8 * scale
        nibbles = blocks[..., header:]
        integers = torch.cat([nibbles & 15, nibbles >> 4], -1).to(torch.int8)
        return cls(integers.flatten(1), scale, minimum, 4)

    def rows(self, index: torch.Tensor | slice) -> Self:
        """The same weight with its outputs in another order, or some of them."""
        return type(self)(self.integers[index], self.scale[index], self.minimum[index], self.bits)

    def dense(self) -> torch.Tensor:
        """The weight, float32 [N, K]."""
        return _dense(self.integers, self.scale, self.minimum)


def concatenated(parts: list[Quantised]) -> Quantised | None:
    """Weights of several layers over the same rows, one below the other; None if they differ."""
    if len({part.bits for part in parts}) != 1:
        return None
    return Quantised(
        torch.cat([part.integers for part in parts]),
        torch.cat([part.scale for part in parts]),
        torch.cat([part.minimum for part in parts]),
        parts[0].bits,
    )


def supported(weight: Quantised, device: torch.device) -> bool:
    """Whether the kernel can multiply by such a weight here."""
    outputs, columns = weight.integers.shape
    return device.type == "cpu" and outputs % OUTPUTS == 0 and columns % GROUP == 0


def make_int4(weight: Quantised, bias: torch.Tensor | None, many_rows: int = 0) -> Linear:
    """The product with a packed weight: x [R, K] to [R, N], of the type of x.

    From `many_rows` rows on (0: never) it goes through the unpacked weight, a chunk of outputs
    at a time; the integers are then kept a second time.
    """
    few = _few_rows(weight)
    many = _unpacked(weight) if many_rows else few

    def multiply(x: torch.Tensor) -> torch.Tensor:
        if many_rows and len(x) >= many_rows:
            result = many(x.float()).to(x.dtype)
        else:
            result = few(x.to(torch.bfloat16)).to(x.dtype)
        return result if bias is None else result.add_(bias)

    return multiply


def rows_to_unpack(weight: Quantised, clock: Callable[[], float] = time.perf_counter) -> int:
    """Measure from how many rows on unpacking a weight of this shape is quicker; 0 for never."""
    few, many = _few_rows(weight), _unpacked(weight)
    for rows in _MANY_ROWS:
        x = torch.randn(rows, weight.integers.shape[1])
        halved = x.to(torch.bfloat16)
        times = [[_time(few, halved, clock), _time(many, x, clock)] for _ in range(4)][1:]
        if min(t[1] for t in times) < 0.9 * min(t[0] for t in times):
            return rows
    return 0


def _few_rows(weight: Quantised) -> Linear:
    """x bfloat16 [R, K] to bfloat16 [R, N] by the kernel."""
    if weight.bits == 4:
        return _packed(weight.integers, weight.scale, weight.minimum + 8 * weight.scale)
    high, low = weight.integers >> 4, weight.integers & 15
    upper = _packed(high + 8, 16 * weight.scale, torch.zeros_like(weight.scale))
    lower = _packed(low, weight.scale, 8 * weight.scale)

    def multiply(x: torch.Tensor) -> torch.Tensor:
        return upper(x).add_(lower(x))

    return multiply


def _unpacked(weight: Quantised) -> Linear:
    """x float32 [R, K] to [R, N] through float32 weights that exist for a chunk at a time."""
    chunks = [torch.split(part, _CHUNK) for part in (weight.integers, weight.scale, weight.minimum)]

    def multiply(x: torch.Tensor) -> torch.Tensor:
        return torch.cat(
            [functional.linear(x, _dense(*part)) for part in zip(*chunks, strict=True)], -1
        )

    return multiply


def _half(raw: torch.Tensor) -> torch.Tensor:
    """Two bytes each [..., 2] as numbers [...]."""
    return raw.contiguous().view(torch.float16)[..., 0].float()


def _dense(integers: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    grouped = integers.view(len(integers), -1, GROUP).float()
    return torch.addcmul(minimum[..., None], grouped, scale[..., None]).flatten(1)


def _packed(q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> Linear:
    """x bfloat16 [R, K] times w = scale (q - 8) + zero."""
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q.to(torch.int32), 1)
    scale_and_zero = torch.stack([scale.t(), zero.t()], -1).to(torch.bfloat16).contiguous()
    run = torch.ops.aten._weight_int4pack_mm_for_cpu

    def multiply(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = run(x, packed, GROUP, scale_and_zero)
        return result

    return multiply


def _time(multiply: Linear, x: torch.Tensor, clock: Callable[[], float]) -> float:
    began = clock()
    multiply(x)
    return clock() - began
