"""Tensors of torch as values of `outrider.messages`, and back."""

import torch

from outrider.messages import Tensor

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def packed(rows: torch.Tensor) -> Tensor:
    """A tensor in bfloat16, on any device, which is waited for."""
    narrow = rows.to("cpu", torch.bfloat16).contiguous()
    return Tensor("bfloat16", tuple(narrow.shape), narrow.view(torch.uint8).numpy().tobytes())


def unpacked(value: Tensor) -> torch.Tensor:
    """A tensor in float32, of memory of its own.

    Raises:
        ValueError, RuntimeError: the data is not that of dtype and shape.
    """
    # The bytes of a message can't be written to, and torch insists on memory that can.
    flat = torch.frombuffer(bytearray(value.data), dtype=_DTYPES[value.dtype])
    return flat.view(value.shape).float()
