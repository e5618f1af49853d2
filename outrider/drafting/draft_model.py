"""What a drafter runs: a model over pages of KV, and which of the target's ids it can name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch

from outrider.drafting.base import HiddenStates
from outrider.model.blocks import BlockPool
from outrider.model.chains import Chains
from outrider.model.loading import LoadedModel
from outrider.model.paged import Numerics, PagedModel, Segment
from outrider.model.rows import StepOutput


@dataclass(frozen=True)
class DraftHead:
    """Which ids the columns of a drafter's logits stand for.

    A cut head has `token_ids` int64 [R], ascending: the id of each column. Without it a column
    is an id. Ids from `token_count` on are never proposed.
    """

    token_count: int
    token_ids: torch.Tensor | None = None

    @property
    def is_cut(self) -> bool:
        """Whether columns are not ids."""
        return self.token_ids is not None

    @cached_property
    def _columns(self) -> int:
        if self.token_ids is None:
            return self.token_count
        return int((self.token_ids < self.token_count).sum())

    def usable(self, logits: torch.Tensor) -> torch.Tensor:
        """The columns of logits [rows, R] that may be proposed, which are the first ones."""
        return logits[:, : self._columns]

    def ids(self, columns: Sequence[int]) -> list[int]:
        """The ids of columns."""
        if self.token_ids is None:
            return list(columns)
        ids: list[int] = self.token_ids[list(columns)].tolist()
        return ids

    def widened(self, usable: torch.Tensor) -> torch.Tensor:
        """Usable logits as [rows, token_count] by id, -inf where the head has none."""
        if self.token_ids is None:
            return usable
        wide = usable.new_full((len(usable), self.token_count), -torch.inf)
        wide[:, self.token_ids[: self._columns]] = usable
        return wide


@dataclass(frozen=True, slots=True)
class Fed:
    """Rows of one sequence; `states` [size] are those that a row's token was made of, by row.

    A row that is left out has none that is known.
    """

    segment: Segment
    states: Mapping[int, torch.Tensor] = field(default_factory=dict)


class DraftModel(Protocol):
    """A model that a `ModelDrafter` runs.

    It takes ids below `vocab_size`, in sequences of up to `context_len`. `reads` is what it
    would know of the target.
    """

    @property
    def name(self) -> str:
        """What people call it."""

    @property
    def context_len(self) -> int:
        """The longest sequence."""

    @property
    def vocab_size(self) -> int:
        """How many ids can be fed."""

    @property
    def pool(self) -> BlockPool:
        """The blocks of its KV."""

    @property
    def head(self) -> DraftHead:
        """What its logits are about."""

    @property
    def reads(self) -> HiddenStates | None:
        """The hidden states of the target that it reads."""

    @property
    def chains(self) -> Chains | None:
        """Whole proposals at once, with KV in the same pages; None where it has only `forward`."""

    def forward(self, fed: Sequence[Fed]) -> StepOutput:
        """Run the rows and write their KV; float32 logits [W, R].

        `hidden` [W, size] are the states that tokens chosen from these logits are made of. They
        may be a view of a buffer that the next call writes, and that it reads before.
        """


class PlainDraftModel:
    """A causal LM with `total_blocks` of KV that reads nothing but tokens; a `DraftModel`.

    Where the tokenizer has fewer ids than the embedding has rows, the rest is padding, and a
    target would call a draft with such an id malformed: it has `token_count` of them.
    """

    reads = None
    chains = None

    def __init__(
        self,
        model: LoadedModel,
        *,
        total_blocks: int,
        token_count: int | None = None,
        numerics: Numerics | None = None,
    ) -> None:
        self.name = model.name
        self.context_len = model.context_len
        self.vocab_size = model.vocab_size
        self.head = DraftHead(token_count or model.vocab_size)
        self._paged = PagedModel(model, total_blocks, numerics)
        self.pool = self._paged.pool

    def forward(self, fed: Sequence[Fed]) -> StepOutput:
        """Run the rows; see `DraftModel`."""
        output = self._paged.step([one.segment for one in fed])
        return StepOutput(output.logits.float(), output.hidden)
