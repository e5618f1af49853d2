"""The logits of a step, asked for tokens or for whole rows, wherever they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from outrider.sampling.acceptance import TargetTokens
from outrider.sampling.coupled import Targets, unusable_rows
from outrider.sampling.rows import Row


@dataclass(frozen=True, slots=True)
class Choosing:
    """What is wanted of a step's rows of logits.

    `rows` say how the token of each is chosen. Rows that `whole` names can be looked at as
    logits. Ids from `token_count` on are padding, never chosen.
    """

    rows: Sequence[Row]
    whole: Sequence[int]
    token_count: int


class Scores(Protocol):
    """R rows of logits, of tokens that can be chosen."""

    @property
    def targets(self) -> TargetTokens:
        """What the coupled rule chooses on each row; None for a dead one."""
        ...

    def logits(self, begin: int, end: int) -> torch.Tensor:
        """Rows [begin, end) as float [end - begin, V]; only those that were asked for whole."""
        ...

    def broken(self, row: int) -> bool:
        """Whether a row's logits are NaN or infinite."""
        ...

    def hidden(self, rows: Sequence[int]) -> torch.Tensor:
        """What the head made rows of: [len(rows), hidden], in the model's type."""
        ...


class WholeScores:
    """`Scores` of logits that are in one place: [R, V], made of `hidden` [R, hidden]."""

    def __init__(self, logits: torch.Tensor, hidden: torch.Tensor, choosing: Choosing) -> None:
        self._logits, self._hidden = logits[:, : choosing.token_count].float(), hidden
        self.targets: TargetTokens = Targets(self._logits, choosing.rows)

    def logits(self, begin: int, end: int) -> torch.Tensor:
        """Rows [begin, end)."""
        return self._logits[begin:end]

    def broken(self, row: int) -> bool:
        """Whether a row's logits are NaN or infinite."""
        return bool(unusable_rows(self._logits[row : row + 1]))

    def hidden(self, rows: Sequence[int]) -> torch.Tensor:
        """What the head made rows of."""
        return self._hidden[list(rows)]
