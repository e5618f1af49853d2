"""How far to draft, what a draft is worth, and when to do without; prefill beside decoding.

Waiting for a proposal of k tokens can save at most k plain steps, so a session never waits
longer than k times the time of a step; how much of that is worth it is decided in
`verify_worker.waiting`. A session that keeps losing time to drafts nevertheless stops asking
and tries again after a while that doubles each time. A draft worker that lets the wants of
its sessions pass, one after the other, is left alone by all of them for a while, and then
asked once.
"""

import math
from dataclasses import dataclass

from outrider.messages import SpeculationOptions
from outrider.model.blocks import BLOCK_TOKENS
from verify_worker.cost import CostModel, StepShape

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
# What is expected of a drafter of which nothing is known, as a share of the draft's tokens;
# how many drafts that guess counts for, and how many the figures of the drafter's other
# sessions do for a session: single drafts say little, and sessions that draft make the steps
# longer for those that do not. Over about how many drafts is averaged.
FIRST_SHARE = 0.5
DRAFTS_GUESSED = 2
DRAFTS_OF_OTHERS = 16
DRAFTS_REMEMBERED = 16


@dataclass(frozen=True, slots=True)
class Stakes:
    """What a session can win and lose with a draft of `draft_len` tokens in this batch.

    `plain_s` is a step without drafts, which is what a plain token costs; `drafted_s` is the
    same step with such a draft for everyone in it.
    """

    draft_len: int
    plain_s: float
    drafted_s: float

    @property
    def limit_s(self) -> float:
        """The longest wait that could ever pay: every token is accepted."""
        return self.draft_len * self.plain_s

    def gain_s(self, share: float) -> float:
        """What a draft saves when `share` of it is accepted; negative where rows are dear."""
        return share * self.limit_s - (self.drafted_s - self.plain_s)


def stakes(decoding: StepShape, draft_len: int, cost: CostModel) -> Stakes:
    """The stakes in a batch of the sessions `decoding`, one row each."""
    drafted = StepShape(
        decoding.rows + decoding.sessions * draft_len,
        decoding.sessions,
        decoding.context,
        decoding.pairs + draft_len * decoding.context,
    )
    return Stakes(draft_len, cost.seconds(decoding), cost.seconds(drafted))


@dataclass(slots=True)
class Expectation:
    """The share of a draft's tokens that is accepted, as far as it is known."""

    drafts: int = 0
    share_seen: float = 0.0

    def note(self, accepted: int, draft_len: int) -> None:
        """Count a draft for which `draft_len` tokens were asked for; an empty one has 0."""
        self.drafts += 1
        weight = 1 / min(self.drafts, DRAFTS_REMEMBERED)
        self.share_seen += weight * (accepted / draft_len - self.share_seen)

    def share(self, prior: float = FIRST_SHARE, counts_for: int = DRAFTS_GUESSED) -> float:
        """What to expect, given a `prior` that counts for so many drafts."""
        weight = self.drafts / (self.drafts + counts_for)
        return prior + weight * (self.share_seen - prior)


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


def draft_len(options: SpeculationOptions, default: int, remaining: int, limit: int) -> int:
    """Tokens to ask for: what the session wants, but never more than can be committed.

    A round commits one token of the target's own, so a draft is useful for at most
    `remaining - 1` tokens. `limit` is the most that the worker verifies in a round.
    """
    if not options.enabled:
        return 0
    wanted = options.draft_len or default
    return max(min(wanted, limit, remaining - 1), 0)


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
