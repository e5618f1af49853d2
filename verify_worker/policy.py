"""How far to draft, how long to wait for a draft, and when to do without: pure functions.

Waiting for a proposal of k tokens can save at most k plain steps, so a session never waits
longer than k times the measured time of a step. A session whose proposals keep coming too
late stops asking and tries again after a while that doubles each time.
"""

from dataclasses import dataclass

from outrider.messages import SpeculationOptions

# Late proposals in a row after which a session does without, and the tokens that it then
# decodes plainly; the pause doubles with each further late proposal.
MISSES_TO_PAUSE = 3
FIRST_PAUSE_TOKENS = 16
LONGEST_PAUSE_TOKENS = 512
# What a step is taken to cost before the first was measured.
INITIAL_STEP_S = 0.5
_SMOOTHING = 0.1


@dataclass(slots=True)
class StepClock:
    """A running estimate of the seconds that a decoding step takes."""

    step_s: float = INITIAL_STEP_S
    measured: bool = False

    def observe(self, seconds: float) -> None:
        """Count one step without prefill."""
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


def pause_tokens(missed: int) -> int:
    """Tokens to decode plainly after `missed` late proposals in a row; 0 means ask again."""
    if missed < MISSES_TO_PAUSE:
        return 0
    return int(min(FIRST_PAUSE_TOKENS * 2 ** (missed - MISSES_TO_PAUSE), LONGEST_PAUSE_TOKENS))
