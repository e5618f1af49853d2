"""What rows cost in a batch, when to do without drafts, and prefill beside decoding.

Waiting for a proposal of k tokens can save at most k plain steps, so a session never waits
longer than k times the time of a step; how much of that is worth it is decided in
`verify_worker.waiting`, how far to draft in `verify_worker.draft_length`. A session that keeps
losing time to drafts nevertheless stops asking and tries again after a while that doubles each
time. A draft worker that lets the wants of its sessions pass, one after the other, is left
alone by all of them for a while, and then asked once.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass

from outrider.messages import SpeculationOptions
from outrider.model.blocks import BLOCK_TOKENS
from verify_worker.cost import CostModel, StepShape

# What a session may lose to drafts, in longest waits, before it does without, and the tokens
# that it then decodes plainly; the pause doubles each time until the loss is made good.
WAITS_TO_PAUSE = 5.0
FIRST_PAUSE_TOKENS = 16
LONGEST_PAUSE_TOKENS = 512
# Misses in a row after which a draft worker rests, and how long; it doubles each time, and is
# never less than so many times the wait that it saves.
MISSES_TO_REST = 3
FIRST_REST_S = 1.0
LONGEST_REST_S = 30.0
REST_WAITS = 10
# Tokens that a session decodes plainly before it reckons again whether drafts would pay.
UNWILLING_TOKENS = 4
# Tokens that are asked for where no wait pays, to see what they would have been worth.
LOOK_TOKENS = 4


class Stakes:
    """What drafts can win and cost in a batch of the sessions `decoding`, one row each.

    `steps_s[r]` is the step with r rows more for everyone in it, up to `most`: a session is
    charged for its rows as if all others drafted as it does, since all wait for them.
    `plain_s` is the step without drafts, which is what a plain token costs. `step` is what the
    last step was made of.
    """

    def __init__(
        self, decoding: StepShape, cost: CostModel, most: int, step: StepShape | None = None
    ) -> None:
        self.plain_s = cost.seconds(decoding)
        self.sessions = decoding.sessions
        self._decoding = decoding
        self._step = step or decoding
        self._cost = cost
        self._most = most
        self._steps_s: tuple[float, ...] = ()

    @property
    def steps_s(self) -> tuple[float, ...]:
        """Seconds by rows more; worked out when it is first asked for, which many never do."""
        if not self._steps_s:
            shapes = map(self._drafted, range(self._most + 1))
            self._steps_s = tuple(map(self._cost.seconds, shapes))
        return self._steps_s

    def delay_s(self, wait_s: float, step_s: float) -> float:
        """What a wait for drafts costs every session of the batch in a round.

        Either steps are held for it, or those who wait are left behind: then the batch takes
        turns from there on, two smaller steps in the place of one of `step_s`, and each half
        waits while the other steps.
        """
        if self.sessions < 2:
            return wait_s
        whole = self._drafted(min(bisect_left(self.steps_s, step_s), self._most))
        half = StepShape(whole.rows // 2, whole.sessions // 2, whole.context // 2, whole.pairs // 2)
        half_s, other_s = self._cost.seconds(half), self._cost.seconds(whole - half)
        turns_s = half_s + other_s - self._cost.seconds(whole)
        return min(wait_s, turns_s + max(wait_s - half_s, 0.0))

    def saved_s(self, accepted: int, rows: int) -> float:
        """What a draft of `rows` tokens in the last step saved its session.

        Without it the session would have had to take steps with the drafts of the others.
        """
        step = self._step
        without = StepShape(max(step.rows - rows, 1), step.sessions, step.context, step.pairs)
        plain_s = self._cost.seconds(without)
        return accepted * plain_s - (self._cost.seconds(step) - plain_s)

    def _drafted(self, rows: int) -> StepShape:
        """The step in which every session has so many rows more."""
        shape = self._decoding
        return StepShape(
            shape.rows + shape.sessions * rows,
            shape.sessions,
            shape.context,
            shape.pairs + rows * shape.context,
        )


def chunk_rows(
    decoding: StepShape, context: int, cost: CostModel, step_tokens: int, most_times: float
) -> int:
    """Rows of prefill that share a step with the sessions `decoding`; all when there is none.

    The step takes at most `most_times` as long as without them, but a prefill always gets a
    block. `context` is how far the prompt that comes first has been read.
    """
    room = step_tokens - decoding.rows
    if not decoding.sessions:
        return room
    longest_s = most_times * cost.seconds(decoding)
    fitting, above = 1, max(room // BLOCK_TOKENS, 1) + 1
    while above - fitting > 1:
        middle = (fitting + above) // 2
        rows = middle * BLOCK_TOKENS
        if cost.seconds(decoding + StepShape.of(rows, context + rows)) <= longest_s:
            fitting = middle
        else:
            above = middle
    return fitting * BLOCK_TOKENS


def draft_lens(
    options: SpeculationOptions, default: int, remaining: int, limit: int, step_share: int
) -> tuple[int, int]:
    """The fewest and the most tokens to ask for; both are the same where k is fixed.

    The request decides, then `default` (0: chosen each round). A round commits one token of
    the target's own, so a draft is useful for at most `remaining - 1` tokens. `limit` is the
    most that the worker verifies in a round, `step_share` what of its rows is a session's.
    """
    if not options.enabled:
        return 0, 0
    fixed = 0 if options.auto_draft_len else options.draft_len or default
    most = max(min(fixed or step_share - 1, limit, remaining - 1), 0)
    return (most if fixed else 0), most


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
        return self.pause()

    def pause(self) -> int:
        """The tokens until the next try; twice as many each time, until something is saved."""
        self.pauses += 1
        return int(min(FIRST_PAUSE_TOKENS * 2 ** min(self.pauses - 1, 10), LONGEST_PAUSE_TOKENS))


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

    def note_answer(self) -> bool:
        """An answer came; True when it ends a rest."""
        rested = self.rests > 0
        self.missed = self.rests = 0
        return rested

    def _rest(self, now_s: float, wait_s: float) -> None:
        rest_s = min(FIRST_REST_S * 2 ** min(self.rests, 10), LONGEST_REST_S)
        self.rest_until_s = now_s + max(rest_s, REST_WAITS * wait_s)
        self.rests += 1
