"""What a whole proposal of a draft network is asked for and gives, whoever computes it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from outrider.model.blocks import BlockTable


@dataclass(frozen=True, slots=True)
class Levels:
    """What was drafted for one session: by level its best tokens, best first, and their chances.

    A level follows the first token of the one before it. Chances are given those before.
    """

    tokens: Sequence[Sequence[int]] = ()
    chances: Sequence[Sequence[float]] = ()


@dataclass(frozen=True, slots=True)
class ChainTurn:
    """A session to draft for: rows to feed behind `table.kv_len`, then up to `levels` levels.

    `states` [hidden] are those that are known of the rows' tokens, by row. It ends early where a
    level would be reached with less than the chance `worth`, chances being multiplied by `trust`
    for that. `seed` and a `temperature` above 0 give it the target's noise. The table's blocks
    must hold the rows and all levels but one.
    """

    token_ids: Sequence[int]
    table: BlockTable
    levels: int
    states: Mapping[int, torch.Tensor] = field(default_factory=dict)
    worth: float = 0.0
    trust: float = 1.0
    temperature: float = 0.0
    seed: int = 0


class Chains(Protocol):
    """Feeds and drafts for many sessions in one call; their tables are left as they are."""

    def draft(self, turns: Sequence[ChainTurn]) -> list[Levels]:
        """What was drafted for each of them."""
