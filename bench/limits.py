"""The physical limit of plain decoding: every weight is read once a step."""

import time
from collections.abc import Callable

import torch

from bench.rounds import Spread
from outrider.model.describe import locate_checkpoint

# Far larger than any cache.
MEMORY_BYTES = 2 << 30


def weight_bytes(path: str) -> int:
    """The bytes of a checkpoint's weights: those of its files, whose headers are small."""
    where = locate_checkpoint(path)
    files = [where] if where.is_file() else sorted(where.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files)


@torch.inference_mode()
def read_bandwidth(size_bytes: int, *, repeats: int = 5) -> Spread:
    """Bytes per second at which torch's present threads read a buffer, again and again.

    The quickest of several kernels that do little but read is what the memory gives.
    """
    buffer = torch.ones(max(size_bytes // 4, 1))
    one_row = torch.ones(1, 1024)
    matrix = buffer[: len(buffer) // 1024 * 1024].view(-1, 1024)
    kernels: list[Callable[[], object]] = [
        buffer.sum,
        lambda: torch.dot(buffer, buffer),
        lambda: torch.nn.functional.linear(one_row, matrix),
    ]
    spreads = []
    for kernel in kernels:
        rates = []
        for repeat in range(repeats + 1):
            began = time.perf_counter()
            kernel()
            if repeat:  # the first only warms up
                rates.append(buffer.numel() * 4 / (time.perf_counter() - began))
        spreads.append(Spread.of(rates))
    return max(spreads, key=lambda spread: spread.median)
