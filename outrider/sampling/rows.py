"""A row: what is known about the position whose token a row of logits decides."""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.messages import SamplingParams


@dataclass(frozen=True, slots=True)
class Row:
    """The tokens before the one that is chosen, and how it is chosen.

    `drafted` follows `committed` (prompt included): the row of a draft sees exactly what plain
    decoding would see there. `stop_ids` are those that `min_tokens` bars.
    """

    sampling: SamplingParams
    committed: Sequence[int]
    drafted: Sequence[int] = ()
    prompt_len: int = 0
    stop_ids: frozenset[int] = frozenset()

    @property
    def position(self) -> int:
        """The index in the sequence of the token that is chosen."""
        return len(self.committed) + len(self.drafted)

    @property
    def completion(self) -> list[int]:
        """The tokens after the prompt."""
        return [*self.committed[self.prompt_len :], *self.drafted]

    @property
    def completion_len(self) -> int:
        """How many tokens there are after the prompt."""
        return self.position - self.prompt_len
