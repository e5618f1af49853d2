"""Whether a draft is worth its wait, and whether a step waits for drafts: no clock, no I/O.

Three questions, each a pure function of what was measured:

- `who_wait`, when sessions that stepped together could ask: who drafts, as all wait for it.
- `best_wait_s`, when a session asks: how long to wait for the proposal before a plain step.
  Waiting costs the session seconds, a proposal saves it plain steps. 0: not worth it.
- `hold_until_s`, when some sessions are ready and others wait: step now, or hold the step
  until some of those have their drafts. Holding delays everybody who is ready; stepping
  makes those who wait begin after the step, and splits the batch in two from then on.
"""

import math
import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from verify_worker.cost import NOTHING, StepShape
from verify_worker.draft_length import Choice

# How many latencies of a draft worker count, and how much longer than the longest of those
# that are worth it a session waits, as the next one differs a little: in latencies, and in
# longest waits for one that is next to nothing.
SAMPLES = 16
SLACK = 1.0
SLACK_LIMITS = 1 / 32
# How much of the gain that is expected counts: a guess must not cost what plain steps would not.
TRUST = 0.95
# How much more than it costs the drafts of a batch have to promise: of many guesses those are
# taken that promise too much, and those who don't draft pay for them, too.
SPARE = 1.25
# A proposal that is due this soon is not due any more: it should be here.
MOMENT_S = 1e-4
# How many rounds ahead a held step is compared with one that is not.
ROUNDS_AHEAD = 4


@dataclass(slots=True, eq=False)
class Sample:
    """How long a proposal of `draft_len` tokens took, in seconds; infinite until it comes,
    should it be late."""

    seconds: float
    draft_len: int = 0


class Latency:
    """How long a draft worker took for its last proposals, as those who asked saw it."""

    def __init__(self) -> None:
        self.seconds: tuple[float, ...] = ()
        self._samples: deque[Sample] = deque(maxlen=SAMPLES)

    def note(self, seconds: float, draft_len: int = 0) -> Sample:
        """Count a proposal of so many tokens, or with infinite `seconds` one that has not come."""
        sample = Sample(seconds, draft_len)
        self._samples.append(sample)
        self._sort()
        return sample

    def correct(self, sample: Sample, seconds: float) -> None:
        """The proposal came after all."""
        if sample not in self._samples:
            self._samples.append(sample)
        sample.seconds = seconds
        self._sort()

    def forget(self) -> None:
        """Forget all: what was known has proved wrong."""
        self._samples.clear()
        self._sort()

    def forget_missing(self) -> None:
        """Forget what never came."""
        left = [sample for sample in self._samples if math.isfinite(sample.seconds)]
        self._samples = deque(left, SAMPLES)
        self._sort()

    def at(self, draft_len: int, token_s: float) -> tuple[float, ...]:
        """What proposals of `draft_len` tokens would have taken, ascending; a token `token_s`."""
        if not token_s:
            return self.seconds
        found = (one.seconds + (draft_len - one.draft_len) * token_s for one in self._samples)
        return tuple(sorted(max(seconds, 0.0) for seconds in found))

    def usual_s(self, token_s: float) -> float:
        """What a proposal usually takes beside `token_s` for each of its tokens."""
        came = [s.seconds - s.draft_len * token_s for s in self._samples if s.seconds < math.inf]
        return max(statistics.median_low(came), 0.0) if came else 0.0

    def _sort(self) -> None:
        self.seconds = tuple(sorted(sample.seconds for sample in self._samples))


def who_wait(
    offers: Mapping[str, Choice], sessions: int, delay_s: Callable[[float, float], float]
) -> set[str]:
    """Whose drafts are worth it, of those who could ask, to all `sessions` of a batch.

    Who drafts shares the wait, which is the longest of theirs; `delay_s(wait, step)` is what
    that costs each session of the batch, drafting or not, in steps that long. Of the offers in
    the order of their waits, so many are taken that most is left of what they save, less the
    delay of all.
    """
    spare = SPARE if sessions > 1 else 1.0
    best = left = 0.0
    taken: list[str] = []
    found: set[str] = set()
    for name in sorted(offers, key=lambda name: offers[name].wait_s):
        offer = offers[name]
        own = offer.left_s(spare)
        if own <= 0:
            continue
        taken.append(name)
        left += own
        value = left - spare * sessions * delay_s(offer.wait_s, offer.step_s)
        if value > best:
            best, found = value, set(taken)
    return found


def best_wait_s(latencies: Sequence[float], gain_s: float, limit_s: float) -> float:
    """How long to wait for a proposal that saves `gain_s` when it comes; 0: not at all.

    `latencies` are those of earlier proposals, ascending. The wait w that is returned, at most
    `limit_s`, is worth most: P(latency <= w) gain_s - E[min(latency, w)].
    """
    best, best_value = 0.0, 0.0
    for latency in latencies:
        if latency > limit_s:
            break
        wait = min(latency * (1 + SLACK) + limit_s * SLACK_LIMITS, limit_s)
        count = bisect_right(latencies, wait)
        spent = sum(latencies[:count]) + (len(latencies) - count) * wait
        value = count * gain_s * TRUST - spent
        if value > 0 and value >= best_value:
            best, best_value = wait, value
    return best


def due_s(latencies: Sequence[float], waited_s: float, wait_s: float) -> float | None:
    """When a proposal is expected, in seconds after it was asked for.

    It has not come for `waited_s` and is waited for until `wait_s`. None: no earlier one
    took that long, so nothing can be said.
    """
    first, last = bisect_right(latencies, waited_s + MOMENT_S), bisect_right(latencies, wait_s)
    return sum(latencies[first:last]) / (last - first) if first < last else None


@dataclass(frozen=True, slots=True)
class Awaited:
    """A session whose proposal is expected at `due_s`; `shape` is its part of a step then.

    `latency_s` is what its proposals take on the whole.
    """

    due_s: float
    latency_s: float
    shape: StepShape


# now_s, ready, ready_since_s, awaited, step_s: until when to hold the step, None to step now.
Gather = Callable[
    [float, StepShape, float, Sequence[Awaited], Callable[[StepShape], float]], float | None
]


def hold_until_s(
    now_s: float,
    ready: StepShape,
    ready_since_s: float,
    awaited: Sequence[Awaited],
    step_s: Callable[[StepShape], float],
) -> float | None:
    """Until when to hold a step of the `ready` sessions for awaited ones; None: step now.

    `ready_since_s` says since when the first of them could have stepped: none is held for
    longer than the step itself takes. `step_s` is what a step takes. For each number of
    awaited sessions that could be held for, the next rounds are played through: those in the
    step and those left out take turns from then on. The choice is the one where the sessions
    finish their rounds soonest, summed over all.
    """
    latest_s = ready_since_s + step_s(ready)
    due = sorted(awaited, key=lambda one: one.due_s)
    within = [one for one in due if now_s < one.due_s <= latest_s]
    if not within:
        return None
    latency_s = sum(one.latency_s for one in due) / len(due)
    left_out = sum((one.shape for one in due), NOTHING)
    best: float | None = None
    shape, begin_s = ready, now_s
    least = math.inf
    for joined in range(len(within) + 1):
        if joined:
            one = within[joined - 1]
            shape, begin_s = shape + one.shape, one.due_s
            left_out -= one.shape
        rest_s = due[joined].due_s if joined < len(due) else 0.0
        total = _finishing_s(shape, left_out, begin_s, rest_s, latency_s, step_s)
        if total < least:
            least, best = total, begin_s if joined else None
    return best


def _finishing_s(
    first: StepShape,
    second: StepShape,
    begin_s: float,
    due_s: float,
    latency_s: float,
    step_s: Callable[[StepShape], float],
) -> float:
    """When sessions finish their next rounds, summed, if two groups of them take turns."""
    first_s, second_s = step_s(first), step_s(second)
    free, total = begin_s, 0.0
    first_due, second_due = begin_s, due_s
    for _ in range(ROUNDS_AHEAD):
        free = max(free, first_due) + first_s
        total += first.sessions * free
        first_due = free + latency_s
        if second.sessions:
            free = max(free, second_due) + second_s
            total += second.sessions * free
            second_due = free + latency_s
    return total
