"""When a call that failed is made again, and when it is given up; no input or output."""

import random
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from outrider.errors import (
    DeadlineError,
    FencedError,
    NoVerifyWorkerError,
    OutriderError,
    OverloadedError,
    UnavailableError,
)

# Two clients that follow one session take it from each other; one of them has to give in, when
# it was taken so often within this time.
MAX_FENCED = 8
FENCED_WITHIN_S = 60.0
# Calls in a row that were answered and broke before a token came, each of which gets the whole
# time again; with further ones it runs on.
MAX_ANSWERED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How long a client keeps trying, in seconds from the first failure.

    start_s: a completion about which no coordinator has said anything yet.
    resume_s: one whose stream broke; each token that comes gives it the whole time again, and so
        does a coordinator that takes it up.
    first_pause_s, longest_pause_s: between two tries of one coordinator. The pause doubles up
        to the longest, and a random part of it is waited. Another coordinator is tried at once.
    """

    start_s: float = 3.0
    resume_s: float = 60.0
    first_pause_s: float = 0.1
    longest_pause_s: float = 2.0


class Attempts:
    """The tries of one completion; `deadline_s` is on the clock of `clock`."""

    def __init__(
        self,
        retry: Retry,
        timeout_s: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._retry = retry
        self._clock = clock
        self._chance = chance
        self._timeout_s = timeout_s
        self._deadline = None if timeout_s is None else clock() + timeout_s
        self._fenced_at: deque[float] = deque(maxlen=MAX_FENCED)
        self._answered = 0
        self._failures = 0
        self._failing_since: float | None = None
        self._tried: set[str] = set()

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the deadline, never below 0; None without one."""
        return None if self._deadline is None else max(self._deadline - self._clock(), 0.0)

    def progressed(self) -> None:
        """Something came: what failed before no longer counts."""
        self._answered = 0
        if self._failures:
            self._forgive()

    def pause_s(
        self,
        error: OutriderError,
        endpoint: str,
        known: Collection[str],
        *,
        begun: bool,
        answered: bool,
    ) -> float:
        """Seconds to wait after `error` at `endpoint` before the next try.

        `known` are the coordinators that could be tried; `begun`, whether the completion
        has said anything, and `answered`, whether this call has.

        Raises:
            DeadlineError: the deadline comes before the next try.
            OutriderError: `error` itself where trying again is of no use, or has been tried
                for long enough.
        """
        if answered:
            # It went on for a while, such as through a prompt.
            self._answered += 1
            if self._answered <= MAX_ANSWERED:
                self._forgive()
        self._failures += 1
        self._tried.add(endpoint)
        now = self._clock()
        if self._failing_since is None:
            self._failing_since = now
        untried = not self._tried.issuperset(known)
        if not self._worth_it(error, begun=begun, answered=answered, untried=untried):
            raise error
        pause_s = 0.0
        if not untried:
            pause_s = max(self._backoff_s(len(known)), error.retry_after_s or 0.0)
        patience_s = self._retry.resume_s if begun else self._retry.start_s
        elapsed_s = now - self._failing_since
        if elapsed_s + pause_s > patience_s:
            raise self._given_up(error, elapsed_s, known, begun=begun)
        if self._deadline is not None and now + pause_s >= self._deadline:
            raise DeadlineError(
                f"the deadline of {self._timeout_s} s passed while no coordinator answered; "
                f"at last: {error.message}"
            )
        return pause_s

    def _forgive(self) -> None:
        self._failures = 0
        self._failing_since = None
        self._tried.clear()

    def _is_taken_for_good(self) -> bool:
        """Whether it was taken too often by now, this time included."""
        now = self._clock()
        before = [moment for moment in self._fenced_at if now - moment < FENCED_WITHIN_S]
        self._fenced_at.append(now)
        return len(before) >= MAX_FENCED

    def _worth_it(
        self, error: OutriderError, *, begun: bool, answered: bool, untried: bool
    ) -> bool:
        if isinstance(error, FencedError):
            return begun and not self._is_taken_for_good()
        if isinstance(error, OverloadedError):
            # Another may have room. One that was not begun is for the caller to bring again; a
            # session that was let in and fails for want of room has waited for it already.
            return not answered and (begun or untried)
        if isinstance(error, NoVerifyWorkerError):
            # The coordinator has waited for one; who has not begun may as well be told.
            return begun or untried
        return isinstance(error, UnavailableError)

    def _backoff_s(self, known: int) -> float:
        rounds = max(self._failures // max(known, 1) - 1, 0)
        retry = self._retry
        # The exponent is bounded as well, since 2 ** 2000 is no float.
        longest_s = min(retry.first_pause_s * 2.0 ** min(rounds, 30), retry.longest_pause_s)
        return longest_s * self._chance()

    def _given_up(
        self, error: OutriderError, elapsed_s: float, known: Collection[str], *, begun: bool
    ) -> OutriderError:
        if not begun or self._failures == 1:
            return error
        return type(error)(
            f"the completion could not be resumed in {self._failures} tries over "
            f"{elapsed_s:.1f} s at {', '.join(known)}; at last: {error.message}",
            retry_after_s=error.retry_after_s,
        )
