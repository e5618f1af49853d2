"""How far to draft: the length that is expected to give most tokens per second. Pure.

What came of drafts is counted position by position, and fades: whether there was a token
there, and whether it was accepted when all before it were. What a session's own drafts do not
say yet is filled in by what the drafter's other sessions show, scaled to how this session
differs from them so far; what those do not say, by a guess.

    tokens(k)  = 1 + sum over positions i < k of P(there is one) * P(it and all before: accepted)
    seconds(k) = wait(k) + the step, in which every session has as many rows more as this one
    k          = the one with most tokens(k) / seconds(k); k = 0 is a plain step

Everybody in a step waits for everybody's rows. So a session is charged as if all of them
drafted as it does: whoever drafts at that price can slow the others by no more than it gains.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.messages import Price

# What is expected of a token of which nothing is known, and of there being one at all.
FIRST_CHANCE = 0.6
FIRST_PRESENT = 0.9
# How much a guess counts for, in drafts: the first one against a drafter's figures; the figure
# of all positions against that of one; that of the drafter against a session's.
GUESS_DRAFTS = 2.0
POSITION_DRAFTS = 6.0
SESSION_DRAFTS = 6.0
# A session's figures lose half their weight after so many committed tokens, those of a drafter
# after so many drafts: texts change, and what is seldom tried should be tried again.
SESSION_HALF_LIFE_TOKENS = 20.0
DRAFTER_HALF_LIFE_DRAFTS = 256.0
# Chances stay off 0 and 1, which no count can prove.
_LEAST, _MOST = 0.001, 0.999
# Rows of a usual draft, over which a further one is priced.
_FEW_ROWS = 8
# What a row costs at least, in tokens: it is never free.
_LEAST_PRICE = 0.01
# Further positions that add less than this to the tokens of a round are not looked at.
_NEGLIGIBLE = 0.01


@dataclass(slots=True)
class Tally:
    """Trials and hits at each position, of series that end with the first miss."""

    trials: list[float] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)

    def note(self, hits: int, limit: int) -> None:
        """Count a series of `hits` hits that could have had `limit`."""
        tried = min(hits + 1, limit)
        while len(self.trials) < tried:
            self.trials.append(0.0)
            self.hits.append(0.0)
        for position in range(tried):
            self.trials[position] += 1
        for position in range(hits):
            self.hits[position] += 1

    def fade(self, share: float) -> None:
        """Keep a `share` of all counts."""
        self.trials = [share * count for count in self.trials]
        self.hits = [share * count for count in self.hits]

    def at(self, position: int) -> tuple[float, float]:
        """Trials and hits there."""
        if position >= len(self.trials):
            return 0.0, 0.0
        return self.trials[position], self.hits[position]

    def shares(self, guess: float, positions: int) -> list[float]:
        """The share of hits at each position; where little is known, that of all but the first.

        The first is another matter: whether there is anything to say, and where to begin.
        """
        trials, hits = self.at(0)
        first = (hits + GUESS_DRAFTS * guess) / (trials + GUESS_DRAFTS)
        rest = (sum(self.hits[1:]) + GUESS_DRAFTS * max(first, guess)) / (
            sum(self.trials[1:]) + GUESS_DRAFTS
        )
        found = [first]
        for position in range(1, positions):
            trials, hits = self.at(position)
            found.append((hits + POSITION_DRAFTS * rest) / (trials + POSITION_DRAFTS))
        return found


@dataclass(slots=True)
class Record:
    """What came of the drafts of one session, or of one drafter.

    `present` counts where there was a token, `accepted` where it was accepted. Of a tree a
    position is a level, and `rows` over `levels` is how many tokens a level has.
    """

    present: Tally = field(default_factory=Tally)
    accepted: Tally = field(default_factory=Tally)
    levels: float = 0.0
    rows: float = 0.0
    drafts: int = 0
    _usual: "tuple[Usual, Usual] | None" = None

    def note(self, *, asked: int, levels: int, rows: int, accepted: int) -> None:
        """Count a draft of `levels` tokens (of a tree: levels, with `rows` tokens) of `asked`."""
        self.drafts += 1
        self.present.note(levels, asked)
        self.accepted.note(accepted, levels)
        self.levels += levels
        self.rows += rows
        self._usual = None

    def note_of_many(self, *, asked: int, levels: int, rows: int, accepted: int) -> None:
        """As `note`, where a drafter's sessions are counted together: older drafts fade."""
        self.fade(0.5 ** (1 / DRAFTER_HALF_LIFE_DRAFTS))
        self.note(asked=asked, levels=levels, rows=rows, accepted=accepted)

    def fade(self, share: float) -> None:
        """Keep a `share` of all counts."""
        self.present.fade(share)
        self.accepted.fade(share)
        self.levels *= share
        self.rows *= share
        self._usual = None

    def usual(self, positions: int) -> "tuple[Usual, Usual]":
        """What these drafts say of others: of a token to be there, and to be accepted."""
        if self._usual is None or len(self._usual[0].shares) != positions:
            self._usual = (
                Usual.of(self.present.shares(FIRST_PRESENT, positions)),
                Usual.of(self.accepted.shares(FIRST_CHANCE, positions)),
            )
        return self._usual


class Usual(NamedTuple):
    """The chances at each position of a drafter's sessions on the whole, and their odds."""

    shares: list[float]
    odds: list[float]

    @staticmethod
    def of(shares: list[float]) -> "Usual":
        """With the odds of these shares."""
        return Usual(shares, [_odds(share) for share in shares])


class Position(NamedTuple):
    """What is expected of a position, given that the draft gets there.

    `present`: there is a token, of `width` in a tree. `accepted`: it is what the target says,
    if all before it were.
    """

    present: float
    accepted: float
    width: float = 1.0


def outlook(own: Record, drafter: Record, positions: int) -> list[Position]:
    """What to expect of a session's next draft; `drafter` are its figures over all sessions."""
    present, accepted = drafter.usual(positions)
    levels = own.levels + drafter.levels
    width = max((own.rows + drafter.rows) / levels, 1.0) if levels else 1.0
    both = zip(_blend(own.present, present), _blend(own.accepted, accepted), strict=True)
    return [Position(there, right, width) for there, right in both]


def _blend(own: Tally, usual: Usual) -> Sequence[float]:
    """The chances of one session, given the usual ones.

    First the session is compared with them as a whole, which gives one factor for the odds;
    then each position by itself counts, the more the more often it was tried.
    """
    if not own.trials:
        return usual.shares
    trials = hits = expected = 0.0
    for share, tried, hit in zip(usual.shares, own.trials, own.hits, strict=False):
        trials += tried
        hits += hit
        expected += tried * share
    factor = 1.0
    if trials:
        mean = expected / trials
        factor = _odds((hits + SESSION_DRAFTS * mean) / (trials + SESSION_DRAFTS)) / _odds(mean)
    chances = [factor * odds / (1 + factor * odds) for odds in usual.odds]
    for position in range(min(len(own.trials), len(chances))):
        tried, hit = own.trials[position], own.hits[position]
        chances[position] = (hit + POSITION_DRAFTS * chances[position]) / (tried + POSITION_DRAFTS)
    return chances


def _odds(chance: float) -> float:
    within = min(max(chance, _LEAST), _MOST)
    return within / (1 - within)


@dataclass(frozen=True, slots=True)
class Choice:
    """A draft length with what is expected of it: tokens of the round, seconds of its step.

    `plain_s` is what a plain step takes; with `draft_len` 0 it is what the round takes. `wait_s`
    comes before the step, `rate` are tokens per second of both, and `row_s` is what a row more
    adds to the step.
    """

    draft_len: int
    tokens: float
    step_s: float
    plain_s: float
    wait_s: float = field(default=0.0, compare=False)
    rate: float = field(default=0.0, compare=False)
    row_s: float = field(default=0.0, compare=False)

    @property
    def gain_s(self) -> float:
        """What the draft saves when it comes: plain steps, less what rows add to the step."""
        return self.left_s(1.0)

    @property
    def pays(self) -> bool:
        """Whether it gives more tokens per second than plain steps."""
        return self.rate * self.plain_s > 1

    def left_s(self, spare: float) -> float:
        """What the draft saves beyond `spare` times what its rows cost, without any wait."""
        return (self.tokens - 1) * self.plain_s - spare * (self.step_s - self.plain_s)

    @property
    def price(self) -> Price:
        """What a draft is charged for what it takes: the tokens that would come meanwhile."""
        return Price(max(self.row_s * self.rate, _LEAST_PRICE), self.rate)

    @property
    def limit_s(self) -> float:
        """The longest wait that could ever pay: every token is accepted."""
        return self.draft_len * self.plain_s


@dataclass(frozen=True, slots=True)
class Wait:
    """How long proposals take: `fixed_s`, and `token_s` for each token of the longest.

    Drafts that `others` are asked for at the same time are made together and come together.
    So a draft is as late as those of `usual_len` tokens, which suit the drafter's sessions on
    the whole; what is longer is also charged for the wait of the others.
    """

    fixed_s: float = 0.0
    token_s: float = 0.0
    others: int = 0
    usual_len: int = 0

    def __call__(self, tokens: int) -> float:
        """Seconds until a proposal of so many tokens is in its step."""
        if not self.others:
            return self.fixed_s + self.token_s * tokens
        beyond = max(tokens - self.usual_len, 0)
        charged = self.usual_len + beyond * (1 + self.others)
        return self.fixed_s + self.token_s * charged


def choose(
    expected: Sequence[Position],
    steps_s: Sequence[float],
    wait_s: Callable[[int], float],
    least: int = 0,
) -> Choice:
    """The draft length from `least` to len(expected) that gives most tokens per second.

    `steps_s[r]` is the step in which every session has r rows more than its one;
    `wait_s(k)` is how long a proposal of k tokens takes until its step. With `least` 0 a plain
    step, which waits for nothing, is among the choices.
    """
    plain_s = steps_s[0]
    tokens, reached, there, step_s = 1.0, 1.0, 1.0, plain_s
    last = len(steps_s) - 1
    row_s = _row_s(steps_s)
    best_rate = 1 / plain_s
    best = Choice(0, 1.0, plain_s, plain_s, 0.0, best_rate, row_s)
    if least:
        best_rate = 0.0
    for index, position in enumerate(expected[:last]):
        there *= position.present
        reached *= position.accepted
        added = there * reached
        if index >= least and added < _NEGLIGIBLE:
            break
        tokens += added
        length, width = index + 1, position.width
        more_s = _step_s(steps_s, length * width, row_s) - _step_s(steps_s, index * width, row_s)
        step_s += there * more_s
        if length < least:
            continue
        waited_s = wait_s(length)
        rate = tokens / (waited_s + step_s)
        if rate > best_rate:
            best, best_rate = Choice(length, tokens, step_s, plain_s, waited_s, rate, row_s), rate
    return best


def _row_s(steps_s: Sequence[float]) -> float:
    """What a further row adds to a step that has a few."""
    most = min(len(steps_s) - 1, _FEW_ROWS)
    return max((steps_s[most] - steps_s[1]) / (most - 1), 0.0) if most > 1 else 0.0


def _step_s(steps_s: Sequence[float], rows: float, row_s: float) -> float:
    """A step with so many rows more, between and beyond those that are known."""
    whole = int(rows)
    if whole >= len(steps_s) - 1:
        return steps_s[-1] + (rows - len(steps_s) + 1) * row_s
    return steps_s[whole] + (rows - whole) * (steps_s[whole + 1] - steps_s[whole])
