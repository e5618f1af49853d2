"""How far to draft, how long to wait for a draft, and when to do without: pure functions.

Waiting for a proposal of k tokens can save at most k plain steps, so a session never waits
longer than k times the measured time of a step. A session that keeps losing time to drafts,
because they come too late or are not worth their wait, stops asking and tries again after a
while that doubles each time. A draft worker that lets the wants of its sessions pass, one
after the other, is left alone by all of them for a while, and then asked once.
"""

import math
from dataclasses import dataclass

from outrider.messages import SpeculationOptions

# What a session may lose to drafts, in longest waits, before it does without, and the tokens
# that it then decodes plainly; the pause doubles each time until the loss is made good.
WAITS_TO_PAUSE = 2.5
FIRST_PAUSE_TOKENS = 16
LONGEST_PAUSE_TOKENS = 512
# Misses in a row after which a draft worker rests, and how long; it doubles each time, and is
# never less than so many times the wait that it saves.
MISSES_TO_REST = 3
FIRST_REST_S = 1.0
LONGEST_REST_S = 30.0
REST_WAITS = 10
# What a step is taken to cost before the first ran.
INITIAL_STEP_S = 0.5
_SMOOTHING = 0.1


@dataclass(slots=True)
class StepClock:
    """A running estimate of the seconds that a decoding step takes."""

    step_s: float = INITIAL_STEP_S
    measured: bool = False

    def observe(self, seconds: float, *, decoding: bool) -> None:
        """Count one step; one with prefill in it only says what a decoding step costs at most."""
        if seconds <= 0:  # it failed
            return
        if not decoding:
            if not self.measured:
                self.step_s = min(self.step_s, seconds)
            return
        if not self.measured:
            self.step_s, self.measured = seconds, True
        self.step_s += _SMOOTHING * (seconds - self.step_s)


def draft_len(options: SpeculationOptions, default: int, remaining: int, limit: int) -> int:
    """Tokens to ask for: what the session wants, but never more than can be committed.

    A round commits one token of the target's own, so a draft is useful for at most
    `remaining - 1` tokens. `limit` is the most that the worker verifies in a round.
    """
    if not options.enabled:
        return 0
    wanted = options.draft_len or default
    return max(min(wanted, limit, remaining - 1), 0)


def wait_s(draft_tokens: int, step_s: float, fixed_s: float) -> float:
    """How long a session waits for `draft_tokens`; `fixed_s` above 0 overrules the estimate."""
    return fixed_s if fixed_s > 0 else draft_tokens * step_s


@dataclass(slots=True)
class Patience:
    """What a session lost by waiting for drafts, less what accepted tokens saved.

    Nothing is saved up: a drafter that was good for long can't cost more than a new one.
    """

    lost_s: float = 0.0
    pauses: int = 0

    def note(self, waited_s: float, saved_s: float, longest_wait_s: float) -> int:
        """Count one round; the tokens to decode plainly from now on, 0 to ask again."""
        limit_s = WAITS_TO_PAUSE * longest_wait_s
        self.lost_s = max(self.lost_s + waited_s - saved_s, 0.0)
        if not self.lost_s:
            self.pauses = 0
        if self.lost_s <= limit_s or waited_s <= saved_s:
            return 0
        # The next loss pauses again; the next gain is a step back to full trust.
        self.lost_s = limit_s
        self.pauses += 1
        return int(min(FIRST_PAUSE_TOKENS * 2 ** (self.pauses - 1), LONGEST_PAUSE_TOKENS))


@dataclass(slots=True)
class Punctuality:
    """Whether a draft worker answers in time, over all its sessions.

    Sessions that wait at the same time miss their proposals together; that counts once.
    """

    missed: int = 0
    missed_at_s: float = -math.inf
    rests: int = 0
    rest_until_s: float = -math.inf

    def may_ask(self, now_s: float, wait_s: float) -> bool:
        """Whether to ask and wait for up to `wait_s`; after a rest one may, and the next begins."""
        if self.missed < MISSES_TO_REST:
            return True
        if now_s < self.rest_until_s:
            return False
        self._rest(now_s, wait_s)
        return True

    def note_missed(self, asked_at_s: float, now_s: float) -> None:
        """A want of `asked_at_s` was waited for in vain."""
        if asked_at_s < self.missed_at_s:
            return
        self.missed += 1
        self.missed_at_s = now_s
        if self.missed == MISSES_TO_REST:
            self._rest(now_s, now_s - asked_at_s)

    def note_in_time(self) -> None:
        """An answer came in time."""
        self.missed = self.rests = 0

    def _rest(self, now_s: float, wait_s: float) -> None:
        rest_s = min(FIRST_REST_S * 2 ** min(self.rests, 10), LONGEST_REST_S)
        self.rest_until_s = now_s + max(rest_s, REST_WAITS * wait_s)
        self.rests += 1
