"""What a model drafter knows of a session, what it does for it in one call, and how it chooses."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from outrider.drafting.base import DraftLaw
from outrider.drafting.draft_model import DraftHead
from outrider.drafting.hits import Hits
from outrider.drafting.tree import Guess
from outrider.messages import (
    FREE,
    AcceptanceRule,
    Draft,
    Price,
    SamplingParams,
    SparseDistribution,
)
from outrider.model.blocks import BlockTable
from outrider.model.paged import NO_PARENT
from outrider.sampling import gumbel_max
from outrider.sampling.coupled import is_sampled, processed_scores, ranked_tokens, unusable_rows
from outrider.sampling.processors import constrains
from outrider.sampling.proposal import draw, quantised
from outrider.sampling.rows import Row

NO_GUESS = Guess()
# Of so many tokens that are not in the KV yet the states are kept; of older ones they are let go.
MOST_STATES = 128


@dataclass(slots=True, eq=False)
class DraftSession:
    """A session as a model drafter follows it.

    `states` are the target's hidden states that committed tokens were made of, by position, of
    those that are still to be fed. `ahead` are drafted tokens whose KV is in the table.
    """

    session_id: str
    token_ids: list[int]
    sampling: SamplingParams
    law: DraftLaw
    table: BlockTable = field(default_factory=BlockTable)
    ahead: list[int] = field(default_factory=list)
    states: dict[int, torch.Tensor] = field(default_factory=dict)
    last_used: int = 0
    # What was drafted last with its chances, and how they have proved.
    guessed: Guess = NO_GUESS
    hits: Hits = field(default_factory=Hits)
    trust: float = 1.0

    @property
    def is_plain(self) -> bool:
        """Whether its tokens are the best ones, or drawn with a temperature and nothing else."""
        if self.law.rule is AcceptanceRule.REJECTION and self.sampling.temperature > 0:
            return False
        if self.sampling.temperature > 0:
            return gumbel_max.is_plain(self.sampling)
        return not constrains(self.sampling)

    def note_states(self, rows: torch.Tensor) -> None:
        """The states [count, size] of the last `count` tokens, which have to be fed again."""
        first = len(self.token_ids) - len(rows)
        self.states.update(enumerate(rows.unbind(0), first))
        self.table.kv_len = min(self.table.kv_len, first)
        self._drop_states(len(self.token_ids) - MOST_STATES)

    def note_fed(self, rows: int) -> None:
        """So many rows more are in the KV. The last committed token may be fed again."""
        self.table.kv_len += rows
        self._drop_states(min(self.table.kv_len, len(self.token_ids) - 1))

    def states_of(self, rows: int) -> dict[int, torch.Tensor]:
        """By row the states that are known of the next rows to feed."""
        begin = self.table.kv_len
        return {p - begin: s for p, s in self.states.items() if begin <= p < begin + rows}

    def _drop_states(self, before: int) -> None:
        for position in [position for position in self.states if position < before]:
            del self.states[position]


@dataclass(slots=True, eq=False)
class Turn:
    """What one call does for one session: feed `feed` tokens, then draft `draft_len`."""

    session: DraftSession
    feed: list[int]
    draft_len: int
    complete: bool
    price: Price = FREE
    draft: list[int] = field(default_factory=list)
    q: list[SparseDistribution] = field(default_factory=list)
    # The draft and what stands beside it, level by level.
    nodes: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    last_node: int = NO_PARENT

    @property
    def row(self) -> Row:
        """The position that is drafted next."""
        session, law = self.session, self.session.law
        return Row(session.sampling, session.token_ids, self.draft, law.prompt_len, law.stop_ids)

    @property
    def spare_nodes(self) -> int:
        """How many more tokens may stand beside the draft."""
        beside = len(self.nodes) - len(self.draft)
        return max(self.session.law.max_nodes - self.draft_len - beside, 0)

    def add(self, best: Sequence[int]) -> None:
        """Draft the first token and put the others beside it, as far as there is room."""
        level = [best[0], *best[1 : 1 + self.spare_nodes]]
        self.parents += [self.last_node] * len(level)
        self.last_node = len(self.nodes)
        self.nodes += level
        self.draft.append(best[0])

    @property
    def result(self) -> Draft:
        """What was drafted."""
        parents = self.parents if len(self.nodes) > len(self.draft) else ()
        return Draft(tuple(self.nodes), tuple(parents), tuple(self.q))

    @property
    def reports_q(self) -> bool:
        """Whether the tokens are sampled from q; without a temperature they are certain."""
        rule, sampling = self.session.law.rule, self.session.sampling
        return rule is AcceptanceRule.REJECTION and sampling.temperature > 0


def choose(turns: Sequence[Turn], logits: torch.Tensor, head: DraftHead, width: int) -> None:
    """Add a token to each draft, and what goes with it; logits are those of `head` [turns, R].

    Where chance is shared with the target, that is up to `width - 1` tokens beside it, else
    the q that it was sampled from.
    """
    logits = head.usable(logits)
    coupled = [i for i, turn in enumerate(turns) if not turn.reports_q]
    if coupled:
        ranked = _ranked(logits[coupled], [turns[i].row for i in coupled], head, width)
        for i, best in zip(coupled, ranked, strict=True):
            turns[i].add(best)
    for i, turn in enumerate(turns):
        if not turn.reports_q:
            continue
        row = turn.row
        scores = processed_scores(head.widened(logits[i : i + 1]), [row])
        if unusable_rows(scores):
            # Nothing is left to choose here; what was drafted so far stands.
            turn.draft_len = len(turn.draft)
            continue
        q = quantised(scores[0].softmax(-1), turn.session.law.q_top)
        turn.add([draw(q, row.sampling.seed, row.position)])
        turn.q.append(q)


def _ranked(
    logits: torch.Tensor, rows: Sequence[Row], head: DraftHead, width: int
) -> list[list[int]]:
    """The best tokens of each row of usable logits, best first.

    Noise and processors go by id; what is simply greedy is chosen among the columns of the head.
    """
    if not head.is_cut:
        return ranked_tokens(logits, rows, width)
    greedy = [r for r, row in enumerate(rows) if not (is_sampled(row) or constrains(row.sampling))]
    others = [r for r in range(len(rows)) if r not in greedy]
    ranked: dict[int, list[int]] = {}
    if greedy:
        columns = ranked_tokens(logits[greedy], [rows[r] for r in greedy], width)
        ranked.update(zip(greedy, map(head.ids, columns), strict=True))
    if others:
        wide = head.widened(logits[others])
        best = ranked_tokens(wide, [rows[r] for r in others], width)
        ranked.update(zip(others, best, strict=True))
    return [ranked[r] for r in range(len(rows))]
