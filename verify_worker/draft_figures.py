"""What was measured of a draft worker, and what that makes of a session's next draft. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outrider.messages import Draft, Proposal
from verify_worker import draft_length, policy
from verify_worker.cost import StepShape
from verify_worker.state import Session
from verify_worker.waiting import Awaited, Latency, best_wait_s, due_s

# Tokens per second over plain steps, if proposals came at once, for which one is waited for to see
# whether they do.
WORTH_A_LOOK = 1.3
# What one more proposal says about how long they are held.
HELD_SHARE = 1 / 16
# The most of a draft worker's time that goes into looking whether drafts would pay again, where
# they don't: it may be time that the target needs.
LOOKING_SHARE = 0.01
# What one more proposal says about what a token costs its drafter.
TOKEN_SHARE = 1 / 8


@dataclass(slots=True)
class DraftWorker:
    """What was measured of one draft worker, over all its sessions.

    `token_s` is what it reports that a token of a draft costs it. `held_s` is how long a step is
    held after a proposal for it has come, for other proposals. `others` are, everywhere, the
    draft lengths that its other sessions ask for at the same time. `reads_hidden` is whether it
    wants what the target's head is given, with every commit.
    """

    punctuality: policy.Punctuality = field(default_factory=policy.Punctuality)
    latency: Latency = field(default_factory=Latency)
    record: draft_length.Record = field(default_factory=draft_length.Record)
    token_s: float = 0.0
    held_s: float = 0.0
    reads_hidden: bool = False
    # Whether the next one that is asked for without hope is waited for.
    look_waits: bool = True
    heeds_price: bool = False
    # When one may be asked for again without hope.
    look_from_s: float = -math.inf
    _costs: int = 0
    # The draft length that suits its sessions on the whole, in the batch that it was found for.
    _usual_len: int = 0
    _usual_in: policy.Stakes | None = None

    def choose(
        self,
        own: draft_length.Record,
        stakes: policy.Stakes,
        draft_lens: tuple[int, int],
        others: Sequence[int],
        heeds_price: bool | None = None,
    ) -> draft_length.Choice:
        """How far a session drafts whose drafts came to `own`.

        `draft_lens` are the fewest and the most tokens. One whose drafter heeds prices, as far as
        is known, asks for the most unless fewer promise more: how many are worth it is seen there.
        """
        least, most = draft_lens
        heeds = self.heeds_price if heeds_price is None else heeds_price
        usual_s = self.latency.usual_s(self.token_s)
        wait = draft_length.Wait(usual_s + self.held_s, self.token_s)
        if others and self.token_s:
            usual_len = self._find_usual_len(stakes, wait, most)
            wait = replace(wait, others=len(others), usual_len=usual_len)
        expected = draft_length.outlook(own, self.record, most)
        best = draft_length.choose(expected, stakes.steps_s, wait, least)
        if heeds and not least:
            whole = draft_length.choose(expected, stakes.steps_s, wait, most)
            return max(whole, best, key=lambda choice: choice.rate)
        return best

    def would_pay(self, own: draft_length.Record, stakes: policy.Stakes, most: int) -> bool:
        """Whether a session would gain much by drafting if proposals came at once."""
        expected = draft_length.outlook(own, self.record, most)
        choice = draft_length.choose(expected, stakes.steps_s, lambda _: 0.0)
        return choice.rate * choice.plain_s > WORTH_A_LOOK

    def _find_usual_len(self, stakes: policy.Stakes, wait: draft_length.Wait, most: int) -> int:
        """How far a session drafts that is like the sessions here on the whole."""
        if self._usual_in is not stakes:
            expected = draft_length.outlook(draft_length.Record(), self.record, most)
            self._usual_len = draft_length.choose(expected, stakes.steps_s, wait).draft_len
            self._usual_in = stakes
        return self._usual_len

    def wait_s(self, choice: draft_length.Choice, others: Sequence[int]) -> float:
        """The wait that pays most; where nothing is known, what the draft is expected to save.

        Drafts are made together and come together, as late as the longest.
        """
        if not choice.draft_len:
            return 0.0
        if not self.latency.seconds:
            return max(choice.gain_s, 0.0)
        latencies = self.latency.at(max(choice.draft_len, *others, 0), self.token_s)
        return best_wait_s(latencies, choice.gain_s, choice.limit_s)

    def awaited(self, session: Session, asked: Sequence[int], now_s: float) -> Awaited | None:
        """When the proposal that a session waits for can be expected; None: nothing is known.

        It is made with others; `asked` are the tokens of each.
        """
        want, asked_at_s = session.want, session.asked_at_s
        if want is None or asked_at_s is None:
            return None
        seconds = self.latency.at(max(asked, default=0), self.token_s)
        wait_s = want.wait_until_s - asked_at_s
        due = due_s(seconds, now_s - asked_at_s, wait_s)
        usual = due_s(seconds, 0.0, wait_s)
        if due is None or usual is None:
            return None
        shape = StepShape.of(1 + want.draft_len, len(session.tokens) + want.draft_len)
        return Awaited(asked_at_s + due, usual, shape)

    def note_cost(self, proposal: Proposal, seconds: float, longest: int) -> None:
        """What a token costs, as is reported; never more than the `seconds` that it all took.

        A draft that was made beside longer ones, of up to `longest` tokens, took their time.
        """
        draft = proposal.draft  # which may be malformed: of a tree nothing is taken for granted
        tokens = max(longest, len(draft.token_ids) if draft.is_chain else 1)
        if draft.token_ids:
            token_s = min(proposal.draft_us / 1e6, max(seconds, 0.0)) / tokens
            self._costs += 1
            self.token_s += max(TOKEN_SHARE, 1 / self._costs) * (token_s - self.token_s)

    def note_held(self, seconds: float) -> None:
        """A step was held so long after a proposal for it had come."""
        self.held_s += HELD_SHARE * (seconds - self.held_s)

    def note_look(self, asked_at_s: float, seconds: float) -> None:
        """A proposal without hope was asked for, and takes the drafter so many seconds."""
        self.look_from_s = max(self.look_from_s, asked_at_s + seconds / LOOKING_SHARE)

    def note_answer(self) -> None:
        """It answers; when that ends a rest, what never came before means nothing any more."""
        if self.punctuality.note_answer():
            self.latency.forget_missing()


def levels_of(draft: Draft) -> int:
    """Tokens of a chain, levels of a tree that is well formed."""
    return len(draft.token_ids) if draft.is_chain else max(draft.depths)
