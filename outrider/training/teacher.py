"""What the target would have said at each place of the answers: its likeliest tokens.

They follow from the hidden states and are the same in every epoch, so they are found once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.training.corpus import Example

# The likeliest tokens carry nearly all of the target's distribution.
TOP = 16
_ROWS = 2048


@dataclass(frozen=True, slots=True)
class Answers:
    """For each answer token but the last what comes after it, the draft's ids all.

    said int64 [B, A]: the text's own token, -1 where the draft has no id for it or there is none;
    ids int64 and p float32 [B, A, K]: the target's likeliest tokens and their probabilities, over
    the ids of the draft's head.
    """

    said: torch.Tensor
    ids: torch.Tensor
    p: torch.Tensor


class Teacher:
    """The likeliest tokens of every answer, given the rows `head` [R, hidden] of the target."""

    def __init__(
        self, examples: Sequence[Example], head: torch.Tensor, draft_ids: torch.Tensor
    ) -> None:
        """`draft_ids` int64 [V]: the draft's id of each of the target's, -1 where it has none."""
        self._draft_ids = draft_ids
        self._top = min(TOP, len(head))
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        begin = 0
        while begin < len(examples):
            end, rows = begin, 0
            while end < len(examples) and (rows < _ROWS or end == begin):
                rows += len(examples[end].answer)
                end += 1
            self._learn(examples[begin:end], head)
            begin = end

    @torch.no_grad()
    def _learn(self, examples: Sequence[Example], head: torch.Tensor) -> None:
        states = np.concatenate([example.hidden[1:] for example in examples]).astype(np.float32)
        p, ids = (torch.from_numpy(states) @ head.T).softmax(-1).topk(self._top, -1)
        begin = 0
        for example in examples:
            end = begin + len(example.answer) - 1
            self._known[example.index] = (ids[begin:end].int(), p[begin:end].clone())
            begin = end

    def of(self, examples: Sequence[Example]) -> Answers:
        """Side by side, as `outrider.training.batches.stack` puts the texts."""
        longest = max(len(example.answer) for example in examples)
        said = torch.full((len(examples), longest), -1)
        ids = torch.zeros(len(examples), longest, self._top, dtype=torch.int64)
        p = torch.zeros(len(examples), longest, self._top)
        for row, example in enumerate(examples):
            count = len(example.answer) - 1
            said[row, :count] = self._draft_ids[torch.tensor(example.answer[1:])]
            ids[row, :count], p[row, :count] = self._known[example.index]
        return Answers(said, ids, p)
