"""What the ranks of a target take while they load, each in a process of its own."""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from bench.report import Bar, Report
from outrider.memory import format_bytes
from outrider.model.numerics import FAST, choose_numerics
from outrider.model.parallel.group import Limits, RankGroup
from outrider.model.parallel.shards import load_shard


def loaded_bytes(path: str, rank: int, size: int) -> tuple[int, int, int]:
    """What a rank read and kept at most, and by how much its process grew: bytes.

    Weights that need no copy stay mapped from the file, and count once they are looked at. Packed
    ones are laid out.
    """
    limits = Limits()
    before = _resident_bytes("VmRSS")
    group = RankGroup(rank, size, None, None, torch.device("cpu"), limits)
    packed = path.endswith(".gguf")
    shard = load_shard(path, group, packed=packed)
    for parameter in shard.model.module.parameters():
        parameter.sum()
    if packed:
        choose_numerics(FAST, shard.model)
    return shard.read_bytes, shard.peak_bytes, _resident_bytes("VmHWM") - before


def _resident_bytes(name: str) -> int:
    """Memory of this process now, `VmRSS`, or at most so far, `VmHWM` (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def memory_report(path: str, sizes: Sequence[int]) -> Report:
    """What every rank takes, of so many ranks together."""
    report = Report(
        "Loading", ["ranks", "rank", "read", "weights at most", "process grew at most by"]
    )
    whole = 0
    for size in sizes:
        for rank in range(size):
            with ProcessPoolExecutor(1, max_tasks_per_child=1) as pool:
                found = pool.submit(loaded_bytes, path, rank, size).result()
            whole = whole or found[1]
            report.rows.append([size, rank, *map(format_bytes, found)])
            report.figures[f"{rank}/{size}"] = {"peak": found[1], "grew": found[2]}
    worst = max(entry["peak"] for name, entry in report.figures.items() if not name.endswith("/1"))
    report.bars.append(Bar("a rank never holds all weights", worst < 0.6 * whole))
    return report
