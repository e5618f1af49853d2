"""What fills a step: a compiled forward, or linears, attention and other operators."""

import cProfile
import io
import pstats
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

COMPILED, LINEARS, ATTENTION = "compiled forward", "linears", "attention"
OTHER, REST = "other operators", "Python and engine"

# How a compiled forward, all of it, is recorded.
_COMPILED_STEP = "outrider::compiled_step"
# Parts of the names of torch's operators.
_LINEAR_OPERATORS = ("linear", "addmm", "::mm", "::mv", "matmul", "int4pack", "int8pack")
_ATTENTION_OPERATORS = ("attention", "bmm", "attend", "softmax")


@dataclass(frozen=True, slots=True)
class Operator:
    """Of one operator: calls and seconds of its own in a step."""

    name: str
    calls: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds of a step by kind, and the operators that take the most."""

    step_s: float
    seconds: dict[str, float]
    operators: tuple[Operator, ...]


def kind_of(operator: str) -> str:
    """Which kind an operator of torch is."""
    if operator == _COMPILED_STEP:
        return COMPILED
    if any(part in operator for part in _ATTENTION_OPERATORS):
        return ATTENTION
    if any(part in operator for part in _LINEAR_OPERATORS):
        return LINEARS
    return OTHER


def break_down(step: Callable[[], object], steps: int) -> Breakdown:
    """Run 2 * `steps` steps: without a profiler for the whole, with it for the parts.

    The profiler costs about a microsecond a call, so that the smallest operators look larger
    than they are; the rest is what the steps without it take beyond the operators.
    """
    step()  # the first is slower
    began = time.perf_counter()
    for _ in range(steps):
        step()
    step_s = (time.perf_counter() - began) / steps
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            step()
    operators = [
        Operator(event.key, event.count / steps, event.self_cpu_time_total / 1e6 / steps)
        for event in profiler.key_averages()
    ]
    seconds = dict.fromkeys((COMPILED, LINEARS, ATTENTION, OTHER), 0.0)
    for operator in operators:
        seconds[kind_of(operator.name)] += operator.seconds
    seconds[REST] = max(step_s - sum(seconds.values()), 0.0)
    operators.sort(key=lambda operator: -operator.seconds)
    return Breakdown(step_s, seconds, tuple(operators))


def functions(step: Callable[[], object], steps: int, *, most: int = 25) -> str:
    """The Python functions that take the most of `steps` steps, as `pstats` prints them."""
    profiler = cProfile.Profile()
    with torch.inference_mode():
        profiler.enable()
        for _ in range(steps):
            step()
        profiler.disable()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(most)
    return text.getvalue()
