"""What every rank does with an order: its part of the step, and its part of the answer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from outrider.errors import UnsupportedModelError
from outrider.model import flex
from outrider.model.numerics import FAST, choose_numerics
from outrider.model.paged import Numerics, PagedModel
from outrider.model.parallel.choosing import candidates
from outrider.model.parallel.group import RankGroup
from outrider.model.parallel.messages import Kind, Order, Wanted
from outrider.model.parallel.shards import Shard
from outrider.model.rows import StepOutput


@dataclass(frozen=True, slots=True)
class Answer:
    """What rank 0 has after a step; the others have nothing.

    `whole` [rows, token_count] are the rows that were wanted whole, in the model's type;
    `candidates` those of every rank for the others; `hidden` [W, hidden] is what the head made
    the logits of.
    """

    whole: torch.Tensor
    candidates: Sequence[torch.Tensor]
    hidden: torch.Tensor


class Member:
    """One rank's part of a model and its pages; blocks are numbered alike on all ranks."""

    def __init__(self, shard: Shard, group: RankGroup, paged: PagedModel) -> None:
        self.group = group
        self.paged = paged
        self._begin, self._end = shard.begin, shard.end
        self._each = -(-shard.model.vocab_size // group.size)

    @classmethod
    def of(
        cls,
        shard: Shard,
        group: RankGroup,
        total_blocks: int,
        *,
        numerics: str = FAST,
        forward: str = "auto",
        linears: str = "auto",
        attention: str = flex.SDPA,
    ) -> "Member":
        """One rank ready for orders; all ranks must get there with the same arguments.

        Raises:
            UnsupportedModelError: such numerics or such a forward can't be split.
        """
        chosen = split_numerics(
            shard,
            group.size,
            numerics=numerics,
            forward=forward,
            linears=linears,
            attention=attention,
        )
        return cls(shard, group, PagedModel(shard.model, total_blocks, chosen))

    @torch.inference_mode()
    def follow(self, order: Order) -> Answer | None:
        """Do all of an order: copy KV, run the rows, answer."""
        self.paged.move(order.moves)
        return self.run(order)

    @torch.inference_mode()
    def run(self, order: Order) -> Answer | None:
        """Run the rows and answer; None on all ranks but 0."""
        with self.group.watched(starting=order.kind is Kind.FIRST):
            output = self.paged.step(order.segments)
            wanted = order.wanted
            whole = self._gather_whole(output, wanted)
            parts: list[torch.Tensor] | None = []
            if wanted.greedy or wanted.drawn:
                parts = self.group.gather(candidates(output.logits, self._begin, wanted))
        if self.group.rank or whole is None or parts is None:
            return None
        return Answer(whole, parts, output.hidden)

    def _gather_whole(self, output: StepOutput, wanted: Wanted) -> torch.Tensor | None:
        own = output.logits
        if not wanted.whole:
            return own.new_empty(0, wanted.token_count)
        if len(wanted.whole) < len(own):
            own = own[list(wanted.whole)]
        parts = gather_vocabulary(own[:, : self._end - self._begin], self._each, self.group)
        return None if parts is None else parts[:, : wanted.token_count]


def split_numerics(
    shard: Shard,
    size: int,
    *,
    numerics: str = FAST,
    forward: str = "auto",
    linears: str = "auto",
    attention: str = flex.SDPA,
) -> Numerics:
    """The numerics of one of `size` ranks; lays its weights out anew (see `choose_numerics`).

    Talks to no other rank.

    Raises:
        UnsupportedModelError: such numerics or such a forward can't be split.
    """
    if numerics != FAST and size > 1:
        raise UnsupportedModelError(
            f"--numerics {numerics} is not kept over {size} ranks: the order of sums "
            f"over ranks depends on the rows of a step; use --numerics {FAST}"
        )
    return choose_numerics(
        numerics, shard.model, forward=forward, linears=linears, attention=attention
    )


def gather_vocabulary(own: torch.Tensor, each: int, group: RankGroup) -> torch.Tensor | None:
    """Every rank's slice [rows, v] of the vocabulary side by side on rank 0; None elsewhere.

    `each`: tokens of a rank; the last may have fewer, and what is beside its own is padding.
    """
    # All parts have to be of one size.
    parts = group.gather(functional.pad(own, (0, each - own.shape[1])))
    return None if parts is None else torch.cat(parts, 1)
