"""Ways to multiply rows by a weight: x [R, K] with a weight [N, K] and a bias [N] gives [R, N].

A prepacked weight is laid out once, at load, the way its kernel reads it. That is what makes a
few rows cost about as much as one: the weight streams through once, whatever the rows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

Linear = Callable[[torch.Tensor], torch.Tensor]
# The number of rows that a weight is laid out for; the layout serves any other number too.
_MKL_ROWS = 256
_ONEDNN_ROWS = 16


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to multiply: `make` lays out a weight; `fits` says whether it can."""

    name: str
    fits: Callable[[torch.Tensor], bool]
    make: Callable[[torch.Tensor, torch.Tensor | None], Linear]


def _dense(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    def multiply(x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, weight, bias)

    return multiply


def _onednn(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ONEDNN_ROWS)
    run = torch.ops.mkldnn._linear_pointwise

    def multiply(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = run(x, packed, bias, "none", [], "")
        return result

    return multiply


def _mkl(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), _MKL_ROWS)
    # The operator reads nothing but the shape of the plain weight, which needs no memory then.
    shape = weight.new_empty(()).expand(weight.shape)
    run = torch.ops.mkl._mkl_linear

    def multiply(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = run(x, packed, shape, bias, x.numel() // x.shape[-1])
        return result

    return multiply


def _on_cpu(weight: torch.Tensor, *dtypes: torch.dtype) -> bool:
    return weight.device.type == "cpu" and weight.dtype in dtypes


DENSE = Kind("dense", lambda weight: True, _dense)
ONEDNN = Kind(
    "onednn",
    lambda weight: (
        torch._C._has_mkldnn
        and (
            _on_cpu(weight, torch.float32)
            or (_on_cpu(weight, torch.bfloat16) and torch.ops.mkldnn._is_mkldnn_bf16_supported())
        )
    ),
    _onednn,
)
MKL = Kind(
    "mkl",
    lambda weight: torch._C.has_mkl and _on_cpu(weight, torch.float32),
    _mkl,
)
KINDS = (DENSE, ONEDNN, MKL)
