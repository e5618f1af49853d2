"""How many replicas a HorizontalPodAutoscaler or KEDA would want. Pure; times are seconds.

After Kubernetes' horizontal controller (kubernetes/kubernetes, pkg/controller/podautoscaler,
autoscaling/v2) for one external metric with a target of type AverageValue, and after KEDA's rule
for the first and the last replica.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# The controller's default for --horizontal-pod-autoscaler-tolerance.
TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class Step:
    """How many replicas may come or go in `period_s`: a number, or a share with `percent`."""

    value: int
    period_s: float
    percent: bool = False


@dataclass(frozen=True, slots=True)
class Direction:
    """One direction of a behaviour; without steps nothing limits it."""

    window_s: float = 0.0
    steps: Sequence[Step] = ()

    @classmethod
    def of(cls, values: Mapping[str, Any], speed: float = 1.0) -> "Direction":
        """As the chart's values have it, `speed` times as fast."""
        steps = [
            Step(one["value"], one["periodSeconds"] / speed, one["type"] == "Percent")
            for one in values.get("policies", ())
        ]
        return cls(values.get("stabilizationWindowSeconds", 0) / speed, tuple(steps))


@dataclass(slots=True)
class Scaler:
    """Follows a metric whose value over `target` is the replicas that it asks for.

    With `least` 0 and a `cooldown_s` it is KEDA's: it starts the first replica when the value is
    above 0 and stops the last one after the value was not for so long.
    """

    target: float
    least: int
    most: int
    up: Direction = field(default_factory=Direction)
    down: Direction = field(default_factory=Direction)
    cooldown_s: float = 0.0
    _wanted: list[tuple[float, int]] = field(default_factory=list)
    _changes: list[tuple[float, int]] = field(default_factory=list)
    _active_s: float = -math.inf

    def replicas(self, now_s: float, current: int, value: float) -> int:
        """How many there should be from now on."""
        if value > 0:
            self._active_s = now_s
        if self.least == 0 and not current:
            return 1 if value > 0 else 0
        if self.least == 0 and now_s - self._active_s >= self.cooldown_s:
            self._wanted.clear()
            return self._changed(now_s, current, 0)
        wanted = self._stabilized(now_s, current, self._asked(current, value))
        if wanted > current:
            wanted = min(wanted, max(self._limit(now_s, current, self.up, 1), current))
        elif wanted < current:
            wanted = max(wanted, min(self._limit(now_s, current, self.down, -1), current))
        return self._changed(now_s, current, min(max(wanted, self.least, 1), self.most))

    def _asked(self, current: int, value: float) -> int:
        if current and abs(value / (self.target * current) - 1) <= TOLERANCE:
            return current
        return min(max(math.ceil(value / self.target), self.least, 1), self.most)

    def _stabilized(self, now_s: float, current: int, asked: int) -> int:
        longest_s = max(self.up.window_s, self.down.window_s)
        self._wanted = [(at, n) for at, n in self._wanted if now_s - at <= longest_s]
        self._wanted.append((now_s, asked))
        lowest = min(n for at, n in self._wanted if now_s - at <= self.up.window_s)
        highest = max(n for at, n in self._wanted if now_s - at <= self.down.window_s)
        return min(max(current, lowest), highest)

    def _limit(self, now_s: float, current: int, direction: Direction, sign: int) -> int:
        """The furthest of the steps, from where their periods began."""
        limits = []
        for step in direction.steps:
            moved = [n for at, n in self._changes if now_s - at < step.period_s and n * sign > 0]
            begin = current - sum(moved)
            if step.percent:
                share = begin * (1 + sign * step.value / 100)
                limits.append(math.ceil(share) if sign > 0 else int(share))
            else:
                limits.append(begin + sign * step.value)
        if not limits:
            return self.most if sign > 0 else 0
        return max(limits) if sign > 0 else min(limits)

    def _changed(self, now_s: float, current: int, replicas: int) -> int:
        if replicas != current:
            self._changes.append((now_s, replicas - current))
        return replicas
