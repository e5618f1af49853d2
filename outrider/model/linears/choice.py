"""Which way to multiply suits a weight: measured at load, since no rule holds on every machine.

Each shape is measured with the row counts of decoding and verifying. A kind whose result is
not the plain one up to rounding, at any number of rows that is tried, is not used at all.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from outrider.model.linears.kinds import DENSE, KINDS, Kind, Linear

# Row counts that are measured. Prefill chunks have more; they are few.
_ROWS = (1, 4, 8, 32)
# Row counts that are checked for correct results.
_CHECKED_ROWS = (1, 2, 3, 5, 8, 9, 16, 17, 32, 33, 64, 65, 257)
# Rounds of measurement, and the seconds for one shape after which no further one begins.
_ROUNDS = 7
_BUDGET_S = 0.4
# Several weights of one shape take turns, so that caches hold no more of them than when the
# whole model runs.
_SAMPLE_BYTES = 32 << 20
_MOST_COPIES = 8
# Times differ by less from one moment to the next: then the simpler kind is as good.
_MARGIN = 0.03


@dataclass(frozen=True, slots=True)
class Choice:
    """The kind for one shape, and the seconds that each kind took by rows."""

    kind: Kind
    seconds: dict[str, dict[int, float]]


@torch.inference_mode()
def choose_kind(
    like: torch.Tensor,
    kinds: Sequence[Kind] = KINDS,
    clock: Callable[[], float] = time.perf_counter,
) -> Choice:
    """The kind for weights of the shape [N, K], type and device of `like`, on random ones.

    Takes about half a second and 32 MB for each kind, or twice the weight.
    """
    candidates = [kind for kind in kinds if kind.fits(like) and _agrees(kind, like)]
    if len(candidates) < 2:
        return Choice(candidates[0] if candidates else DENSE, {})
    copies = max(_SAMPLE_BYTES // (like.numel() * like.element_size()), 1)
    sample = [torch.randn_like(like) for _ in range(min(copies, _MOST_COPIES))]
    made = {kind.name: [kind.make(weight, None) for weight in sample] for kind in candidates}
    times: dict[str, dict[int, list[float]]] = {
        kind.name: {rows: [] for rows in _ROWS} for kind in candidates
    }
    began = clock()
    for round_ in range(_ROUNDS + 1):
        # Turn by turn, so that a disturbance does not hit one kind alone; the first warms up.
        for rows in _ROWS:
            x = torch.randn(rows, like.shape[1], dtype=like.dtype, device=like.device)
            for name, products in made.items():
                taken = _time(products, x, clock)
                if round_:
                    times[name][rows].append(taken / len(sample))
        if round_ and clock() - began > _BUDGET_S:
            break
    # The least is what the kernel takes, the rest is what disturbed it.
    seconds = {name: {rows: min(taken) for rows, taken in of.items()} for name, of in times.items()}
    return Choice(_quickest(candidates, seconds), seconds)


def _time(products: Sequence[Linear], x: torch.Tensor, clock: Callable[[], float]) -> float:
    began = clock()
    for multiply in products:
        multiply(x)
    return clock() - began


def _quickest(candidates: Sequence[Kind], seconds: dict[str, dict[int, float]]) -> Kind:
    """The kind with the best geometric mean over the row counts; earlier ones win ties."""

    def mean(kind: Kind) -> float:
        return statistics.fmean(math.log(max(t, 1e-9)) for t in seconds[kind.name].values())

    best = candidates[0]
    for kind in candidates[1:]:
        if mean(kind) < mean(best) - _MARGIN:
            best = kind
    return best


def _agrees(kind: Kind, weight: torch.Tensor) -> bool:
    """Whether the kind gives the plain result, up to rounding, whatever the number of rows."""
    if kind is DENSE:
        return True
    generator = torch.Generator().manual_seed(0)
    multiply = kind.make(weight, None)
    x = torch.randn(max(_CHECKED_ROWS), weight.shape[1], generator=generator)
    x = x.to(weight.device, weight.dtype)
    expected = functional.linear(x, weight).float()
    # Rounding of a sum of K products, each of the size of a weight.
    unit = torch.finfo(weight.dtype).eps * weight.float().abs().max() * weight.shape[1] ** 0.5
    tolerance = float(unit) * 8
    for rows in _CHECKED_ROWS:
        result = multiply(x[:rows]).float()
        if not torch.allclose(result, expected[:rows], rtol=1e-2, atol=tolerance):
            return False
    return True
