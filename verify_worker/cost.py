"""What a step costs: seconds as a function of its rows, sessions and context, as measured.

    seconds = base(rows) + a * (sessions - 1) + b * context + c * pairs

`base` is piecewise linear between knots at powers of two. Knots and slopes are the state of
one Kalman filter: every step corrects what took part in it and, through the covariance,
what is near. Its trust fades back to where it began (stabilised forgetting, Kulhavy and
Zarrop 1993), so that it never stops learning and never forgets what nothing contradicts.

No model, no clock, no torch.
"""

import math
import statistics
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

KNOTS = tuple(2**power for power in range(13))
# A step before any was measured: this long for one row, and twice that for so many more.
INITIAL_STEP_S = 0.5
ROWS_TO_DOUBLE = 32
# Standard deviations, as fractions of a step, of what is not known at first: all knots
# together, each by itself (neighbours being alike), and what a session, a token of context
# and a pair add to a step of one row.
_LEVEL, _KNOT, _ALIKE = 0.5, 0.5, 0.6
_SLOPES = np.array([0.1, 3e-4, 1e-4])
# Noise of a measured step, as a fraction of it; beyond so many deviations it is cut off.
_NOISE = 0.1
_CUT = 3.0
# After so many steps in a row that were cut off on the same side the machine has another
# speed; what is not known then, as a fraction of what was not known at first.
_CHANGED = 5
_UNSURE = 0.1
# What changes from step to step: the speed of the machine as a whole, as a standard deviation,
# and how fast trust in the shape of the curve fades.
_DRIFT = 0.01
_FORGET = 1e-4

_Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step is made of.

    `context` counts the tokens that each session's rows attend to, session by session;
    `pairs` counts them again for every row of a session but its first.
    """

    rows: int
    sessions: int
    context: int = 0
    pairs: int = 0

    @staticmethod
    def of(rows: int, context: int = 0) -> "StepShape":
        """One session with `rows` rows that attend to `context` tokens, themselves included."""
        return StepShape(rows, 1, context, (rows - 1) * context)

    def __add__(self, other: "StepShape") -> "StepShape":
        """Both in one step."""
        return StepShape(
            self.rows + other.rows,
            self.sessions + other.sessions,
            self.context + other.context,
            self.pairs + other.pairs,
        )

    def __sub__(self, part: "StepShape") -> "StepShape":
        """What is left without a part of it."""
        return StepShape(
            self.rows - part.rows,
            self.sessions - part.sessions,
            self.context - part.context,
            self.pairs - part.pairs,
        )


NOTHING = StepShape(0, 0)


class CostModel:
    """Learns from each step; a rough guess until the first one."""

    _state: _Array
    _cov: _Array
    _curve: list[float]
    _slopes: tuple[float, float, float]

    def __init__(self) -> None:
        self.measured = False
        self._cut_off: list[float] = []
        self._begin(INITIAL_STEP_S)

    def seconds(self, shape: StepShape) -> float:
        """What such a step takes; it never falls as a part of `shape` grows. Nothing takes 0."""
        if shape.rows <= 0:
            return 0.0
        low, share = _place(shape.rows)
        curve, (session, token, pair) = self._curve, self._slopes
        base = curve[low] + share * (curve[low + 1] - curve[low])
        others = max(shape.sessions - 1, 0)
        return base + session * others + token * shape.context + pair * shape.pairs

    def marginal_s(self, shape: StepShape, more: StepShape) -> float:
        """What `more` adds to a step of `shape`."""
        return self.seconds(shape + more) - self.seconds(shape)

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from one step; one that failed (0 s) or has no rows says nothing."""
        if shape.rows <= 0 or not 0 < seconds < math.inf:
            return
        if not self.measured:
            self.measured = True
            self._begin(seconds / _guess(shape.rows))
        predicted = self.seconds(shape)
        features = _features(shape)
        error = seconds - float(features @ self._state)
        cov = (1 - _FORGET) * self._cov
        cov += _FORGET * self._prior()
        cov += (_DRIFT**2 * self._state)[:, None] * self._state
        gain = cov @ features
        variance = float(features @ gain) + (_NOISE * predicted) ** 2
        most = _CUT * math.sqrt(variance)
        if abs(error) > most and self._has_changed(seconds / predicted):
            return
        state = self._state + gain * (min(max(error, -most), most) / variance)
        least = 1e-3 * self._state[0]
        self._state = np.maximum(state, [least] * len(KNOTS) + [0.0] * 3)
        self._cov = cov - gain[:, None] * (gain / variance)
        if abs(error) <= most:
            self._cut_off.clear()
        self._publish()

    def _has_changed(self, ratio: float) -> bool:
        """Count a step that is far off; True when everything was scaled to what is measured."""
        if self._cut_off and (ratio > 1) != (self._cut_off[-1] > 1):
            self._cut_off.clear()
        self._cut_off.append(ratio)
        if len(self._cut_off) < _CHANGED:
            return False
        self._state *= statistics.median(self._cut_off)
        self._cov = _UNSURE * self._prior()
        self._cut_off.clear()
        self._publish()
        return True

    def _begin(self, one_row_s: float) -> None:
        """Start from a guess of what one row takes."""
        self._state = np.array([one_row_s * _guess(rows) for rows in KNOTS] + [0.0] * 3)
        self._cov = self._prior()
        self._publish()

    def _prior(self) -> _Array:
        """The covariance when nothing but the rough size of the state is known."""
        cov = np.zeros((len(self._state),) * 2)
        knots = self._state[: len(KNOTS)]
        cov[: len(KNOTS), : len(KNOTS)] = (knots[:, None] * knots) * _KINSHIP
        slopes = (_SLOPES * knots[0]) ** 2
        cov[-3:, -3:] = np.diag(slopes)
        return cov

    def _publish(self) -> None:
        """Plain numbers for `seconds`, which is asked far more often than it changes."""
        self._curve = np.maximum.accumulate(self._state[: len(KNOTS)]).tolist()
        session, token, pair = self._state[-3:].tolist()
        self._slopes = (session, token, pair)


def _guess(rows: int) -> float:
    """What a step of so many rows takes over one row, when nothing is known."""
    return 1 + (rows - 1) / ROWS_TO_DOUBLE


def _features(shape: StepShape) -> _Array:
    """What the state is multiplied with."""
    features = np.zeros(len(KNOTS) + len(_SLOPES))
    low, share = _place(shape.rows)
    features[low : low + 2] = 1 - share, share
    features[-3:] = max(shape.sessions - 1, 0), shape.context, shape.pairs
    return features


def _place(rows: int) -> tuple[int, float]:
    """The knot at or below `rows`, and how far it is to the next; beyond the last, above 1."""
    low = min(bisect_right(KNOTS, rows) - 1, len(KNOTS) - 2)
    return low, (rows - KNOTS[low]) / (KNOTS[low + 1] - KNOTS[low])


_STEPS = np.arange(len(KNOTS))
_KINSHIP: _Array = _LEVEL**2 + _KNOT**2 * _ALIKE ** np.abs(_STEPS[:, None] - _STEPS[None, :])
