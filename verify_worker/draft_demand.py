"""How many draft workers the sessions would keep busy: what the size of the pool follows. Pure.

Counted is what sessions would ask for if draft workers had nothing else to do, whatever they get:

    drafts   = seconds of decoding / (the step with the draft + its latency without a queue)
    tokens   = drafts * draft length
    busy_s   = tokens * what one token takes of a draft worker's time

so that the demand of an overloaded pool, whose sessions have given up on drafts, is as high as
that of a large one, and a session without a draft worker has one, too. The rate of `busy_s` is a
number of draft workers. "Nothing else to do" leaves out the queue, and that batches take longer.
A session whose drafts don't pay even then has none.
"""

import math
from dataclasses import dataclass, field

from outrider.messages import Proposal
from verify_worker import draft_length
from verify_worker.policy import Stakes

# What one more proposal says about what drafts take.
SHARE = 1 / 16
# One that took more than so many times the usual counts as if it took that: a process that was
# stopped for a second is no reason for more draft workers. What lasts is believed all the same.
OUTLIER = 4.0
# What a token takes as long as nobody has said: little, but not nothing.
FIRST_TOKEN_S = 0.001
# How long it holds how far a session would draft.
CONSIDER_S = 0.5


@dataclass(slots=True)
class Appetite:
    """What one session would ask for: drafts of `draft_len` tokens in rounds of `round_s`.

    `counted_s` is until when it is counted, None while the session does not decode; `decided_s`
    when that was found out.
    """

    draft_len: int = 0
    round_s: float = 1.0
    counted_s: float | None = None
    decided_s: float = -math.inf


@dataclass(slots=True)
class DraftDemand:
    """Demand since the start, over all sessions, and what it is reckoned with.

    `waited_s` are seconds that sessions spent waiting for drafts. `share_s` is what a token takes
    of a draft worker's time, `overhead_s` what a proposal takes beside drafting and queueing,
    `record` what came of drafts. All are of all draft workers: a session that has none reckons
    with those of earlier ones.
    """

    busy_s: float = 0.0
    tokens: float = 0.0
    waited_s: float = 0.0
    share_s: float = FIRST_TOKEN_S
    overhead_s: float = 0.0
    record: draft_length.Record = field(default_factory=draft_length.Record)
    _proposals: int = 0
    # Seconds from token to token, by the size of the batch: of 1, 2 to 3, 4 to 7, …
    _token_s: dict[int, float] = field(default_factory=dict)

    @property
    def token_s(self) -> float:
        """What a token takes when it is drafted beside as few others as was ever seen."""
        return self._token_s[min(self._token_s)] if self._token_s else 0.0

    def note_proposal(self, proposal: Proposal, asked: int, seconds: float) -> None:
        """Learn from a proposal for `asked` tokens that took `seconds`.

        What it says of itself is a hint: never more than it took as a whole.
        """
        if asked < 1 or seconds <= 0:
            return
        self._proposals += 1
        weight = max(SHARE, 1 / self._proposals)
        worked_s = min(proposal.draft_us / 1e6, seconds)
        queued_s = min(proposal.timings.queue_us / 1e6, seconds - worked_s)
        together = max(proposal.timings.batch_sessions, 1)
        share_s = worked_s / together / asked
        if self._proposals > 1:
            share_s = min(share_s, max(OUTLIER * self.share_s, FIRST_TOKEN_S))
        self.share_s += weight * (share_s - self.share_s)
        self.overhead_s += weight * (seconds - worked_s - queued_s - self.overhead_s)
        known_s = self._token_s.setdefault(together.bit_length(), worked_s / asked)
        self._token_s[together.bit_length()] += SHARE * (worked_s / asked - known_s)

    def count(self, appetite: Appetite, now_s: float) -> None:
        """Count the time that a session has decoded since it was last counted."""
        since_s, appetite.counted_s = appetite.counted_s, now_s
        if since_s is None or not appetite.draft_len:
            return
        tokens = max(now_s - since_s, 0.0) / appetite.round_s * appetite.draft_len
        self.tokens += tokens
        self.busy_s += tokens * self.share_s

    def consider(
        self,
        appetite: Appetite,
        own: draft_length.Record,
        stakes: Stakes,
        draft_lens: tuple[int, int],
        now_s: float,
    ) -> None:
        """Find out, now and then, how far a session would draft; `own` came of its drafts.

        `draft_lens` are the fewest and the most tokens.
        """
        least, most = draft_lens
        if not most:
            appetite.draft_len = 0
        elif now_s >= appetite.decided_s + CONSIDER_S:
            wait = draft_length.Wait(self.overhead_s, self.token_s)
            expected = draft_length.outlook(own, self.record, most)
            choice = draft_length.choose(expected, stakes.steps_s, wait, least)
            appetite.draft_len = choice.draft_len
            appetite.round_s = choice.step_s + wait(choice.draft_len)
            appetite.decided_s = now_s
