"""How many draft workers the sessions would keep busy: what the size of the pool follows. Pure.

Counted is what sessions would ask for if draft workers had nothing else to do, whatever they get:

    drafts   = seconds of decoding / (the step with the draft + its latency without a queue)
    tokens   = drafts * draft length
    busy_s   = tokens * what one token takes of a draft worker's time

so that the demand of an overloaded pool, whose sessions have given up on drafts, is as high as
that of a large one, and a session without a draft worker has one, too. The rate of `busy_s` is a
number of draft workers. A session whose drafts don't pay even then has none.
"""

from dataclasses import dataclass, field

from outrider.messages import Proposal
from verify_worker import draft_length

# What one more proposal says about what drafts take.
SHARE = 1 / 16
# What a token takes as long as nobody has said: little, but not nothing.
FIRST_TOKEN_S = 0.001
# A session that gets no drafts finds out again how far it would draft after so long.
RECONSIDER_S = 0.5


@dataclass(slots=True)
class Appetite:
    """What one session would ask for: drafts of `draft_len` tokens in rounds of `round_s`.

    `counted_s` is until when it is counted; None while the session does not decode.
    """

    draft_len: int = 0
    round_s: float = 1.0
    counted_s: float | None = None
    _decided_s: float | None = None

    def is_stale(self, now_s: float) -> bool:
        """Whether to find out again what a session would ask for that asks for nothing."""
        return self._decided_s is None or now_s >= self._decided_s + RECONSIDER_S

    def decide(self, draft_len: int, round_s: float, now_s: float | None) -> None:
        """Want so much from now on; None for `now_s`: find out again as soon as it is asked."""
        self.draft_len, self.round_s, self._decided_s = draft_len, round_s, now_s


@dataclass(slots=True)
class DraftDemand:
    """Demand since the start, over all sessions, and what it is reckoned with.

    `waited_s` are seconds that sessions spent waiting for drafts. `token_s` is what a token takes
    its drafter, `share_s` that time by all sessions that it drafted for at once, `overhead_s`
    what a proposal takes beside drafting and queueing. All three are of all draft workers: a
    session that has none reckons with those of earlier ones.
    """

    busy_s: float = 0.0
    tokens: float = 0.0
    waited_s: float = 0.0
    token_s: float = 0.0
    share_s: float = FIRST_TOKEN_S
    overhead_s: float = 0.0
    record: draft_length.Record = field(default_factory=draft_length.Record)
    _proposals: int = 0

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
        self.token_s += weight * (worked_s / asked - self.token_s)
        self.share_s += weight * (worked_s / together / asked - self.share_s)
        self.overhead_s += weight * (seconds - worked_s - queued_s - self.overhead_s)

    def latency_s(self, draft_len: int) -> float:
        """What a proposal of so many tokens takes a draft worker that does nothing else."""
        return self.overhead_s + self.token_s * draft_len

    def count(self, appetite: Appetite, now_s: float) -> None:
        """Count the time that a session has decoded since it was last counted."""
        since_s, appetite.counted_s = appetite.counted_s, now_s
        if since_s is None or not appetite.draft_len:
            return
        tokens = max(now_s - since_s, 0.0) / appetite.round_s * appetite.draft_len
        self.tokens += tokens
        self.busy_s += tokens * self.share_s

    def reconsider(
        self,
        appetite: Appetite,
        own: draft_length.Record,
        steps_s: tuple[float, ...],
        draft_lens: tuple[int, int],
        now_s: float,
    ) -> None:
        """Find out how far a session would draft that asks for nothing as things are."""
        least, most = draft_lens
        wait = draft_length.Wait(self.overhead_s, self.token_s)
        expected = draft_length.outlook(own, self.record, most)
        choice = draft_length.choose(expected, steps_s, wait, least)
        self._decide(appetite, choice, now_s)

    def asks(self, appetite: Appetite, choice: draft_length.Choice) -> None:
        """A session asks for what it has chosen."""
        self._decide(appetite, choice, None)

    def _decide(self, appetite: Appetite, choice: draft_length.Choice, now_s: float | None) -> None:
        length = choice.draft_len
        appetite.decide(length, choice.step_s + self.latency_s(length), now_s)
